/* The kernels of gated graph networks, and values of graphs; linked with those of kernels.c, whose
 * sources for models it includes.
 */
#include "shared.inc"

#include "float.inc"
#include "gated.inc"
#include "readouts.inc"

#include "double.inc"
#include "gated.inc"
#include "readouts.inc"
