"""geartrain: asynchronous model-parallel training of networks that follow their data.

A model is cut into parts that exchange messages and update their own weights. Ten ideas: stream,
message, row, node, graph, part, worker, controller, runtime, instrument. Begin with ``Graph`` and
``Session``.
"""

from geartrain import nn as nn
from geartrain.data.minibatches import LoadedMinibatches as LoadedMinibatches
from geartrain.data.minibatches import Minibatches as Minibatches
from geartrain.data.minibatches import minibatch as minibatch
from geartrain.engine.controller import AbstractRamp as AbstractRamp
from geartrain.engine.controller import Ramp as Ramp
from geartrain.engine.controller import Synchronous as Synchronous
from geartrain.engine.instrument import AbstractInstrument as AbstractInstrument
from geartrain.engine.mailbox import AbstractPolicy as AbstractPolicy
from geartrain.engine.mailbox import BackwardFirst as BackwardFirst
from geartrain.engine.mailbox import FullestFirst as FullestFirst
from geartrain.engine.mailbox import OldestFirst as OldestFirst
from geartrain.engine.mailbox import Sweeps as Sweeps
from geartrain.errors import CheckpointError as CheckpointError
from geartrain.errors import DataError as DataError
from geartrain.errors import GeartrainError as GeartrainError
from geartrain.errors import GraphError as GraphError
from geartrain.errors import NonFiniteError as NonFiniteError
from geartrain.errors import StuckError as StuckError
from geartrain.errors import WorkerError as WorkerError
from geartrain.ir.bundle import AbstractBundleKernel as AbstractBundleKernel
from geartrain.ir.bundle import Inside as Inside
from geartrain.ir.frame import View as View
from geartrain.ir.gear import Gear as Gear
from geartrain.ir.gear import check_gears as check_gears
from geartrain.ir.graph import Graph as Graph
from geartrain.ir.graph import Stream as Stream
from geartrain.ir.instance import Instance as Instance
from geartrain.ir.kernel import AbstractRowKernel as AbstractRowKernel
from geartrain.ir.kernel import register_kernel as register_kernel
from geartrain.ir.loss import Metric as Metric
from geartrain.ir.loss import accuracy as accuracy
from geartrain.ir.loss import cross_entropy as cross_entropy
from geartrain.nn.credit import AbstractCredit as AbstractCredit
from geartrain.nn.credit import Backprop as Backprop
from geartrain.nn.credit import Chunked as Chunked
from geartrain.nn.credit import Critics as Critics
from geartrain.nn.credit import DecoupledGreedy as DecoupledGreedy
from geartrain.nn.credit import Greedy as Greedy
from geartrain.nn.credit import Overlapping as Overlapping
from geartrain.nn.credit import Synthetic as Synthetic
from geartrain.nn.pipeline import Pipeline as Pipeline
from geartrain.observe.flops import FlopMeter as FlopMeter
from geartrain.observe.flops import Flops as Flops
from geartrain.optim.delay import AbstractDelay as AbstractDelay
from geartrain.optim.delay import AnnealedRate as AnnealedRate
from geartrain.optim.delay import DelayCompensated as DelayCompensated
from geartrain.optim.delay import GapAware as GapAware
from geartrain.optim.delay import ScaledByStaleness as ScaledByStaleness
from geartrain.optim.exchange import AbstractExchange as AbstractExchange
from geartrain.optim.exchange import AllReduce as AllReduce
from geartrain.optim.exchange import Inbox as Inbox
from geartrain.optim.exchange import Letter as Letter
from geartrain.optim.exchange import Member as Member
from geartrain.optim.exchange import NearestNeighbours as NearestNeighbours
from geartrain.optim.mixer import AbstractMixer as AbstractMixer
from geartrain.optim.mixer import Average as Average
from geartrain.optim.optimizers import LookAheadSGD as LookAheadSGD
from geartrain.optim.optimizers import SpikeCompensatedSGD as SpikeCompensatedSGD
from geartrain.optim.part import Clip as Clip
from geartrain.optim.part import Flush as Flush
from geartrain.optim.part import Instances as Instances
from geartrain.optim.part import Messages as Messages
from geartrain.optim.part import Part as Part
from geartrain.optim.part import Rows as Rows
from geartrain.optim.part import Rules as Rules
from geartrain.optim.replicas import Neighbours as Neighbours
from geartrain.optim.views import AbstractView as AbstractView
from geartrain.optim.views import Corrected as Corrected
from geartrain.optim.views import DoubleBuffered as DoubleBuffered
from geartrain.optim.views import Mixed as Mixed
from geartrain.optim.views import Predicted as Predicted
from geartrain.optim.views import Recomputed as Recomputed
from geartrain.optim.views import Stashed as Stashed
from geartrain.runtime.simulated import Costs as Costs
from geartrain.runtime.simulated import Join as Join
from geartrain.runtime.simulated import Leave as Leave
from geartrain.runtime.simulated import Pause as Pause
from geartrain.runtime.simulated import Simulated as Simulated
from geartrain.runtime.threads import Threads as Threads
from geartrain.train.results import Evaluation as Evaluation
from geartrain.train.results import Fit as Fit
from geartrain.train.results import Target as Target
from geartrain.train.session import Session as Session

__version__ = "0.1.0"
