/* The products of native kernels and nothing else: calls of those that kernels.c has. */
#include "shared.inc"

#include "float.inc"

#include "double.inc"

#define FEW_COLUMNS 4 /* so narrow a result is made of dot products, as kernels make it */

/* Operands are used again and again: a, b (packed, or its columns one after another), c. */
#define ALONE(REAL, TYPE, NAME)                                                               \
  void alone_##NAME(int64_t n, const Done *done, const REAL *a, const REAL *b, REAL *c) {     \
    for (const Done *p = done; p < done + n; p++) {                                           \
      if (p->width < FEW_COLUMNS && !p->turned) {                                             \
        for (int64_t i = 0; i < p->rows; i++)                                                 \
          for (int64_t j = 0; j < p->width; j++)                                              \
            c[i * p->width + j] = dot_##TYPE(a + i * p->depth, b + j * p->depth, p->depth);   \
        continue;                                                                             \
      }                                                                                       \
      multiply_##TYPE(p->rows, p->depth, p->width, b, (Product_##TYPE){                       \
          .a = a, .a_row = p->turned ? 1 : p->depth, .a_column = p->turned ? p->rows : 1,     \
          .c = c, .c_row = p->width});                                                        \
    }                                                                                         \
  }
ALONE(float, float, float32)
ALONE(double, double, float64)
