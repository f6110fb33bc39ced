/* The kernels of Tree-LSTMs over whole trees; linked with those of native/kernels.c, whose
 * sources it includes too.
 */
#include "shared.inc"
#include "forest.inc"

#include "float.inc"
#include "trees.inc"

#include "double.inc"
#include "trees.inc"
