"""Resource kinds by name: what `NodeResourceSpec.kind` may say."""

from worker.resources.attention.sdpa import SdpaAttention
from worker.resources.base import Resource
from worker.resources.kv.paged import PagedKv
from worker.resources.positions import Positions
from worker.resources.sampler import Sampler

KINDS: dict[str, type[Resource]] = {
    "paged_kv": PagedKv,
    "sdpa_attention": SdpaAttention,
    "positions": Positions,
    "sampler": Sampler,
}
