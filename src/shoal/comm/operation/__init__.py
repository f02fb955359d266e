"""The operations: what must be equal on all ranks, what moves, what the caller gets.

An operation knows nothing of transports. It describes itself in a header,
prepares a `Payload` of flat, contiguous tensors once the others' numbers are known, and
hands over the result afterwards. A transport only ever sees payloads.
"""

from shoal.comm.operation.base import Operation, Payload, flatten, writing
from shoal.comm.operation.rows import (
    APART,
    AllGather,
    AllToAll,
    Gather,
    ReduceScatter,
    Scatter,
    overlap,
)
from shoal.comm.operation.whole import (
    AllReduce,
    Barrier,
    Broadcast,
    Receive,
    Reduce,
    Send,
    check_message,
)

__all__ = [
    "APART", "AllGather", "AllReduce", "AllToAll", "Barrier", "Broadcast", "Gather", "Operation",
    "Payload", "Receive", "Reduce", "ReduceScatter", "Scatter", "Send", "check_message", "flatten",
    "overlap", "writing",
]  # fmt: skip
