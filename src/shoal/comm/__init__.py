"""Communication: backends, groups and meshes. Knows nothing of models."""

from shoal.comm.backend import Backend
from shoal.comm.memory.backend import InMemoryBackend
from shoal.comm.mesh import Mesh
from shoal.comm.mpi.backend import MPIBackend
from shoal.comm.operation.reduction import ReduceOp
from shoal.comm.shm.backend import SharedMemoryBackend
from shoal.comm.torch_groups.gloo import GlooBackend
from shoal.comm.torch_groups.nccl import NCCLBackend
from shoal.comm.work import Work
from shoal.comm.world import World

__all__ = [
    "Backend",
    "GlooBackend",
    "InMemoryBackend",
    "MPIBackend",
    "Mesh",
    "NCCLBackend",
    "ReduceOp",
    "SharedMemoryBackend",
    "Work",
    "World",
]
