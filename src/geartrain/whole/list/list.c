/* The kernels of recurrent networks over whole lists; linked with those of kernels.c, whose
 * sources for models it includes.
 */
#include "shared.inc"

#include "float.inc"
#include "lists.inc"

#include "double.inc"
#include "lists.inc"
