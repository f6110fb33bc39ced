/* Row kernels in plain C: no torch, no Python, no state but the count of products and whose threads
 * to use.
 *
 *     kernels.c    what knows no type (rows are moved as bytes), and kernels.inc twice
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
 * which case nothing has been written. Strides are in elements. Rows of inputs may be named by an index (int64), so
 * that residuals are read where they lie; NULL stands for rows one after the other.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

static inline void fetch(const char *row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += LINE) __builtin_prefetch(row + b);
}

typedef struct {
  const char *source;
  const int64_t *source_rows;
  int64_t source_limit;
  char *target;
  const int64_t *target_rows;
  int64_t target_limit;
  int64_t rows;
  int64_t bytes;
} Job;

static void copy_rows(const Job *job) {
  const int64_t bytes = job->bytes, n = job->rows;
  const int64_t *from = job->source_rows, *to = job->target_rows;
  if (!from && !to) {
    memcpy(job->target, job->source, (size_t)(n * bytes));
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    if (from && i + AHEAD < n) fetch(job->source + from[i + AHEAD] * bytes, bytes);
    memcpy(job->target + (to ? to[i] : i) * bytes, job->source + (from ? from[i] : i) * bytes,
           (size_t)bytes);
  }
}

/* target[target_rows[i]] = source[source_rows[i]] for the rows of every job. */
int64_t move_rows(const Job *jobs, int64_t count) {
  for (int64_t k = 0; k < count; k++) {
    const Job *job = jobs + k;
    if (job->source_rows && !within(job->source_rows, job->rows, job->source_limit)) return k + 1;
    if (job->target_rows && !within(job->target_rows, job->rows, job->target_limit)) return k + 1;
  }
  for (int64_t k = 0; k < count; k++)
    if (jobs[k].rows && jobs[k].bytes) copy_rows(jobs + k);
  return 0;
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

/* y (width, n) = the transpose of x (n, width). */
void transpose(int64_t n, int64_t width, const float *x, float *y) {
  const int64_t rows = n - n % TILE, columns = width - width % TILE;
  for (int64_t j = 0; j < columns; j += TILE)
    for (int64_t i = 0; i < rows; i += TILE) turn(x + i * width + j, width, y + j * n + i, n);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = i < rows ? columns : 0; j < width; j++) y[j * n + i] = x[i * width + j];
}

/* Rows of a store have been answered: live[row] becomes 0, and its chunk has one less to wait for.
 * Returns how many chunks wait for nothing any more, their numbers in freed; or -1, and nothing has
 * changed, if a row is out of range, does not wait, or is named twice.
 */
int64_t release_rows(int64_t n, const int64_t *rows, int64_t capacity, uint8_t *live,
                     const int64_t *chunk_of, int64_t *left, int64_t *freed) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t row = rows[i];
    if ((uint64_t)row >= (uint64_t)capacity || !live[row]) {
      while (i-- > 0) live[rows[i]] = 1;
      return -1;
    }
    live[row] = 0;
  }
  for (int64_t i = 0; i < n; i++) {
    const int64_t chunk = chunk_of[rows[i]];
    if (--left[chunk] == 0) freed[count++] = chunk;
  }
  return count;
}

/* Products, counted for whoever asks; see tally.py. Each thread has a count of its own. */
typedef struct {
  int64_t rows, depth, width; /* (rows, depth) times (depth, width) */
  int64_t bytes;              /* of an entry */
  int64_t turned;             /* whether columns of the first operand lie side by side */
} Done;

static int64_t counters; /* how many count, in all threads: most of the time nobody does */
static _Thread_local struct {
  int64_t operations, noted, room;
  Done *notes;
} tallied;

static __attribute__((noinline)) void tally_product(Done product) {
  tallied.operations += 2 * product.rows * product.depth * product.width;
  if (tallied.noted < tallied.room) tallied.notes[tallied.noted] = product;
  tallied.noted++;
}

/* Say so wherever products are done: (rows, depth) times (depth, width), of REAL. */
#define TALLY(...) \
  (__atomic_load_n(&counters, __ATOMIC_RELAXED) ? tally_product((Done){__VA_ARGS__}) : (void)0)

/* One counts from now on (1), or does so no more (-1). Returns the operations of this thread. */
int64_t count_products(int64_t more) {
  __atomic_fetch_add(&counters, more, __ATOMIC_SEQ_CST);
  return tallied.operations;
}

/* Write down this thread's products as long as there is room. Returns how many came before. */
int64_t note_products(int64_t room, Done *notes) {
  const int64_t noted = tallied.noted;
  tallied.noted = 0, tallied.room = room, tallied.notes = notes;
  return noted;
}

#include "threads.inc"

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
#include "bf16.inc"

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
