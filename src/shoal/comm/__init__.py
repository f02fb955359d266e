"""Communication: backends, groups and meshes. Knows nothing of models."""

from shoal.comm.backend import Backend
from shoal.comm.gloo import GlooBackend
from shoal.comm.memory import InMemoryBackend
from shoal.comm.mesh import Mesh
from shoal.comm.mpi import MPIBackend
from shoal.comm.nccl import NCCLBackend
from shoal.comm.reduction import ReduceOp
from shoal.comm.shared_memory import SharedMemoryBackend
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
