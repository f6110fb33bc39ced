/* Native kernels in plain C: no torch, no Python, no state but the count of products, whose
 * threads to use and memory for calls; and no model.
 *
 *     kernels.c     what knows no type: rows.inc, groups.inc, plans.inc, threads.inc, rings.inc,
 *                   spare.inc; and kernels.inc twice
 *     kernels.inc   what computes, once for float and once for double, and
 *     maps.inc, steps.inc  small linear maps; steps of optimisers
 *     sums.inc      gradients of weights from what waits for a step
 *     fused.inc, integers.inc  derived programs; those of their steps that make integers;
 *     functions.inc  functions of numbers in them
 *     calls.inc     many calls of them in one, with rows that lie in buffers of values
 *     ragged.inc    those over rows of several kinds
 *     attend.inc    rows that read a memory
 *     tiles.inc, packing.inc, short.inc  matrix products; their operands, also in bfloat16
 *     bf16.inc      rows in bfloat16
 *
 * and what sources of models include too, which lie beside their models:
 *
 *     shared.inc    what knows no type
 *     float.inc, double.inc  say what is a REAL, and include typed.inc: numbers of it, gates.inc,
 *                   products.inc
 *
 * A function that gets row numbers returns 0, or the number from 1 of what was out of range, in
 * which case nothing has been written. Strides are in elements. Rows of inputs may be named by an
 * index (int64), so that residuals are read where they lie; NULL stands for rows one after the other.
 *
 * It is one unit; or, with UNIT defined as 1 to 5, one of five that are compiled side by side and
 * linked, as all of it takes compilers long.
 */
#include "shared.inc"

#ifdef UNIT
#define IN(unit) (UNIT == (unit))
#else
#define IN(unit) 1
#endif
#define PART __attribute__((visibility("hidden"))) /* what units share, and models do not */
#define FOR_MODELS /* what their libraries call, and ctypes does not */

#ifdef __clang__
#define INTERLEAVE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVE(a, b, ...) __builtin_shuffle(a, b, (Indices){__VA_ARGS__})
#endif
#define TILE 16
typedef float Tile __attribute__((vector_size(TILE * sizeof(float))));
typedef int32_t Indices __attribute__((vector_size(TILE * sizeof(int32_t))));

/* A square of TILE x TILE, turned by four rounds of perfect shuffles. */
static void turn(const float *x, int64_t x_stride, float *y, int64_t y_stride) {
  Tile rows[TILE], shuffled[TILE];
  for (int i = 0; i < TILE; i++) memcpy(rows + i, x + i * x_stride, sizeof(Tile));
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < TILE / 2; i++) {
      const Tile a = rows[i], b = rows[i + TILE / 2];
      shuffled[2 * i] = INTERLEAVE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      shuffled[2 * i + 1] =
          INTERLEAVE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    memcpy(rows, shuffled, sizeof rows);
  }
  for (int i = 0; i < TILE; i++) memcpy(y + i * y_stride, rows + i, sizeof(Tile));
}

#if IN(1)
FOR_MODELS int64_t counters;
#include "rows.inc"
#include "groups.inc"
#include "plans.inc"
#include "threads.inc"
#include "rings.inc"
#include "spare.inc"
#endif

#if IN(1) || IN(3) || IN(4)
#define UNIT_OF_KERNELS 1
#define UNIT_OF_TILES 3
#define UNIT_OF_PAIRS 4
#include "float.inc"
#include "kernels.inc"
#endif
#if IN(1)
#include "bf16.inc"
#endif

#if IN(2) || IN(5)
#define UNIT_OF_KERNELS 2
#define UNIT_OF_TILES 5
#define UNIT_OF_PAIRS 0 /* there are no pairs of float in a double */
#include "double.inc"
#include "kernels.inc"
#endif
