/* Row kernels in plain C: no torch, no Python, no state but the count of products and whose threads
 * to use.
 *
 *     kernels.c    rows.inc and forest.inc, which know no type, and kernels.inc twice
 *     threads.inc  how one call uses several threads
 *     kernels.inc  what computes, once for float and once for double
 *     products.inc  matrix products; part of the one above, as are the next ones
 *     short.inc    operands of products in bfloat16
 *     gated.inc, readouts.inc  gated graph networks and values of graphs
 *     trees.inc    Tree-LSTMs over whole trees
 *     lists.inc    recurrent networks over whole lists
 *     maps.inc, steps.inc  small linear maps; steps of optimisers
 *     bf16.inc     the same for rows in bfloat16, by way of those for float
 *
 * A function that gets row numbers returns 0, or the number from 1 of what was out of range, in
 * which case nothing has been written. Strides are in elements. Rows of inputs may be named by an
 * index (int64), so that residuals are read where they lie; NULL stands for rows one after the other.
 *
 * It is one unit; or, with UNIT defined as 1 to 5, one of five that are compiled side by side and
 * linked, as all of it takes compilers long.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef UNIT
#define IN(unit) (UNIT == (unit))
#define PART __attribute__((visibility("hidden"))) /* what units share */
#define ELSEWHERE extern PART
#else
#define IN(unit) 1
#define PART static
#define ELSEWHERE static
#endif

#define AHEAD 4 /* rows to ask memory for before they are needed */
#define LINE 64
/* No entry waits for another: pointers into one row are too many for compilers to compare. */
#define APART _Pragma("GCC ivdep")

/* Whether all of n indices are within 0..limit-1. */
static int within(const int64_t *index, int64_t n, int64_t limit) {
  uint64_t bad = 0;
  for (int64_t i = 0; i < n; i++) bad |= (uint64_t)index[i] >= (uint64_t)limit;
  return !bad;
}

/* Whether lengths are those of so many rows, none of them negative. */
static int add_up_to(int64_t n, const int64_t *lengths, int64_t rows) {
  for (int64_t i = 0; i < n; rows -= lengths[i++])
    if (lengths[i] < 0 || lengths[i] > rows) return 0;
  return !rows;
}

static inline void fetch(const char *row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += LINE) __builtin_prefetch(row + b);
}

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

/* Products, counted for whoever asks; see tally.py. Each thread has a count of its own. */
typedef struct {
  int64_t rows, depth, width; /* (rows, depth) times (depth, width) */
  int64_t bytes;              /* of an entry */
  int64_t turned;             /* whether columns of the first operand lie side by side */
} Done;

#if IN(1)
PART int64_t counters; /* how many count, in all threads: most of the time nobody does */
#else
ELSEWHERE int64_t counters;
#endif
ELSEWHERE void tally_product(Done product);

/* Say so wherever products are done: (rows, depth) times (depth, width), of REAL. */
#define TALLY(...) \
  (__atomic_load_n(&counters, __ATOMIC_RELAXED) ? tally_product((Done){__VA_ARGS__}) : (void)0)

#include "threads.inc"
#if IN(1)
#include "rows.inc"
#include "forest.inc"
#endif

#if IN(1) || IN(3) || IN(4)
#define UNIT_OF_KERNELS 1
#define UNIT_OF_TILES 3
#define UNIT_OF_PAIRS 4
#define REAL float
#define BITS uint32_t
#define NAME(name) name##_float
#define MANTISSA 23
#define BIAS 127
#define SHIFTER 0x1.8p23f
#define LN2_HIGH 0x1.62e4p-1f
#define LN2_LOW 0x1.7f7d1cp-20f
#define LEAST (-87.0f)
#define LOGARITHM logf
#define SQUARE_ROOT sqrtf
#include "kernels.inc"
#endif
#if IN(1)
#include "bf16.inc"
#endif

#if IN(2) || IN(5)
#define UNIT_OF_KERNELS 2
#define UNIT_OF_TILES 5
#define UNIT_OF_PAIRS 0 /* there are no pairs of float in a double */
#define REAL double
#define BITS uint64_t
#define NAME(name) name##_double
#define MANTISSA 52
#define BIAS 1023
#define SHIFTER 0x1.8p52
#define LN2_HIGH 0x1.62e42fefap-1
#define LN2_LOW 0x1.cf79abc9e3b398p-40
#define LEAST (-708.0)
#define LOGARITHM log
#define SQUARE_ROOT sqrt
#include "kernels.inc"
#endif
