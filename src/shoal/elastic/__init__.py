"""Training that goes on while ranks come, go and die; see [Note: a checkpoint in memory].

Begin with `elastic_optimizer.py`: an attempt, its commit, and what follows the loss of a rank.
"""

from shoal.comm.control.membership import Change as Change
from shoal.elastic.async_elastic_optimizer import AsyncElasticOptimizer as AsyncElasticOptimizer
from shoal.elastic.elastic_optimizer import ElasticOptimizer as ElasticOptimizer
from shoal.meeting.elastic_options import Elastic as Elastic
