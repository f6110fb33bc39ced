/* The kernels of gated graph networks, and values of graphs; linked with those of native/kernels.c, whose
 * sources it includes too.
 */
#include "shared.inc"

#include "float.inc"
#include "gated.inc"
#include "readouts.inc"

#include "double.inc"
#include "gated.inc"
#include "readouts.inc"
