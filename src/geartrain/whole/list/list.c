/* The kernels of recurrent networks over whole lists; linked with those of native/kernels.c, whose
 * sources it includes too.
 */
#include "shared.inc"

#include "float.inc"
#include "lists.inc"

#include "double.inc"
#include "lists.inc"
