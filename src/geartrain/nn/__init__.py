"""Cells, row kernels, row dropout; importing it registers the kernels of torch's modules."""

from geartrain.ir.kernel import register_derivation
from geartrain.nn.cells import TokenRNN, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nn.critic import LocalCritic, RowLoss, teach_critics
from geartrain.nn.derived import DerivedKernel
from geartrain.nn.dropout import RowDropout
from geartrain.nn.kernels import register_torch_kernels
from geartrain.nn.shapes import (
    GatedGraphCell,
    GatedSum,
    MessagePassing,
    Recurrent,
    Tree,
    VertexChoice,
    choice_accuracy,
    choice_loss,
    first_states,
)

register_torch_kernels()
register_derivation(DerivedKernel)

__all__ = [
    "DerivedKernel",
    "GatedGraphCell",
    "GatedSum",
    "LocalCritic",
    "MessagePassing",
    "Recurrent",
    "RowDropout",
    "RowLoss",
    "TokenRNN",
    "Tree",
    "TreeLSTMBranch",
    "TreeLSTMLeaf",
    "VertexChoice",
    "choice_accuracy",
    "choice_loss",
    "first_states",
    "teach_critics",
]
