"""Kernels in C, compiled on first use; everything here has a twin in torch, and knows no model.

    build     finds or compiles kernels.c
    library   loads and checks it; or says why not
    rows      moving and adding rows of tensors
    cells     gates of recurrent and tree cells, forward and backward
    losses    softmax cross entropy with its gradient
    maps      linear maps of few rows or few columns
    steps     norms, scales and steps of optimisers
    operations  the products that kernels do inside, counted

A chain of small torch calls takes and gives back the interpreter lock with each of them, so that
threads wait for one another, and each reads and writes all of its rows. A kernel does the chain in
one pass over the rows. It keeps the lock while its work is short, and frees it otherwise.

Functions that compute answer whether they did; if not, the caller does it in torch.
"""

from __future__ import annotations

from geartrain.native.library import kind, status

__all__ = ["kind", "status"]
