"""The operations: what must be equal on all ranks, what moves, what the caller gets.

An operation knows nothing of transports. It describes itself in a header,
prepares a `Payload` of flat, contiguous tensors once the others' numbers are known, and
hands over the result afterwards. A transport only ever sees payloads.
"""

from shoal.comm.operation.base import Operation, Payload
from shoal.comm.operation.flat import APART, flatten, overlap, writing
from shoal.comm.operation.gathering import AllGather, Gather
from shoal.comm.operation.in_place import AllReduce, Barrier, Broadcast, Reduce
from shoal.comm.operation.messages import Receive, Send, check_message
from shoal.comm.operation.scattering import AllToAll, ReduceScatter, Scatter

__all__ = [
    "APART", "AllGather", "AllReduce", "AllToAll", "Barrier", "Broadcast", "Gather", "Operation",
    "Payload", "Receive", "Reduce", "ReduceScatter", "Scatter", "Send", "check_message", "flatten",
    "overlap", "writing",
]  # fmt: skip
