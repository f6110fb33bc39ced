"""Cells, row kernels, row dropout; importing it registers the kernels of torch's modules."""

from geartrain.nn.cells import TokenRNN, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nn.dropout import RowDropout
from geartrain.nn.kernels import register_torch_kernels

register_torch_kernels()

__all__ = ["RowDropout", "TokenRNN", "TreeLSTMBranch", "TreeLSTMLeaf"]
