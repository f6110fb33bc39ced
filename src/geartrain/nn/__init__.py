"""Cells, row kernels, dropout, networks of blocks; importing it registers torch's kernels.

The modules of ``whole`` and ``pipeline`` that users write are exported here as well.
"""

from geartrain.derived.auto import MeasuredChoice
from geartrain.derived.hoist import hoist
from geartrain.derived.kernel import DerivedKernel
from geartrain.derived.ragged.choice import RaggedChoice
from geartrain.nn.attention import AdditiveAttention, DotAttention
from geartrain.nn.cells import TokenRNN, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nn.dropout import RowDropout
from geartrain.nn.kernels import register_torch_checks, register_torch_kernels
from geartrain.nn.residual import PooledHead, ResidualBlock, residual_network
from geartrain.nn.sequential import BundleSequential
from geartrain.nn.shapes import MessagePassing, Recurrent, Tree, first_states
from geartrain.nn.transformer import DecoderBlock, TokenEmbedding, TokenReadout, decoder
from geartrain.nodes.choice import register_choice
from geartrain.nodes.hoisted import register_hoist
from geartrain.nodes.kernel import register_derivation
from geartrain.nodes.ragged import register_ragged_choice
from geartrain.pipeline.critic import LocalCritic, RowLoss, teach_critics
from geartrain.whole.graph.cell import GatedGraphCell
from geartrain.whole.graph.choice import VertexChoice, choice_accuracy, choice_loss
from geartrain.whole.graph.gated_sum import GatedSum
from geartrain.whole.list.module import WholeList
from geartrain.whole.tree.module import WholeTree

register_torch_kernels()
register_torch_checks()
register_derivation(DerivedKernel)
register_hoist(hoist)
register_choice(MeasuredChoice)
register_ragged_choice(RaggedChoice)

__all__ = [
    "AdditiveAttention",
    "BundleSequential",
    "DecoderBlock",
    "DerivedKernel",
    "DotAttention",
    "GatedGraphCell",
    "GatedSum",
    "LocalCritic",
    "MessagePassing",
    "PooledHead",
    "Recurrent",
    "ResidualBlock",
    "RowDropout",
    "RowLoss",
    "TokenEmbedding",
    "TokenRNN",
    "TokenReadout",
    "Tree",
    "TreeLSTMBranch",
    "TreeLSTMLeaf",
    "VertexChoice",
    "WholeList",
    "WholeTree",
    "choice_accuracy",
    "choice_loss",
    "decoder",
    "first_states",
    "residual_network",
    "teach_critics",
]
