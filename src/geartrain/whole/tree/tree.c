/* The kernels of Tree-LSTMs over whole trees; linked with those of kernels.c, whose
 * sources for models it includes.
 */
#include "shared.inc"
#include "forest.inc"

#include "float.inc"
#include "trees.inc"

#include "double.inc"
#include "trees.inc"
