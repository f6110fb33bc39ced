"""geartrain: asynchronous model-parallel training of networks that follow their data.

A model is cut into parts that exchange messages and update their own weights. Ten ideas: stream,
message, row, node, graph, part, worker, controller, runtime, instrument. Begin with ``Graph`` and
``Session``.
"""

from geartrain import nn as nn
from geartrain.engine.controller import Ramp as Ramp
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
from geartrain.ir.graph import Graph as Graph
from geartrain.ir.graph import Stream as Stream
from geartrain.ir.instance import Instance as Instance
from geartrain.ir.kernel import AbstractRowKernel as AbstractRowKernel
from geartrain.ir.kernel import register_kernel as register_kernel
from geartrain.ir.loss import Metric as Metric
from geartrain.ir.loss import accuracy as accuracy
from geartrain.ir.loss import cross_entropy as cross_entropy
from geartrain.optim.centre import DelayedNesterov as DelayedNesterov
from geartrain.optim.centre import ElasticAverage as ElasticAverage
from geartrain.optim.exchange import AbstractExchange as AbstractExchange
from geartrain.optim.exchange import AllReduce as AllReduce
from geartrain.optim.exchange import Inbox as Inbox
from geartrain.optim.exchange import Letter as Letter
from geartrain.optim.exchange import Member as Member
from geartrain.optim.exchange import NearestNeighbours as NearestNeighbours
from geartrain.optim.foreign import DelayCompensated as DelayCompensated
from geartrain.optim.foreign import StalenessAware as StalenessAware
from geartrain.optim.gossip import DecentralizedSGD as DecentralizedSGD
from geartrain.optim.gossip import PairAverage as PairAverage
from geartrain.optim.mixer import AbstractMixer as AbstractMixer
from geartrain.optim.mixer import Average as Average
from geartrain.optim.part import Clip as Clip
from geartrain.optim.part import Flush as Flush
from geartrain.optim.part import Instances as Instances
from geartrain.optim.part import Part as Part
from geartrain.optim.part import Rows as Rows
from geartrain.optim.part import Rules as Rules
from geartrain.optim.periodic import DiLoCo as DiLoCo
from geartrain.optim.periodic import PeriodicAverage as PeriodicAverage
from geartrain.optim.pushsum import PushSum as PushSum
from geartrain.optim.replicas import Neighbours as Neighbours
from geartrain.optim.topology import Exponential as Exponential
from geartrain.optim.topology import Torus as Torus
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
