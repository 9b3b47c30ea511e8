"""The store of sikkatu.kvpersist as an L2 adapter of LMCache (``{"type": "plugin"}``)."""

from .adapter import StoreAdapter, StoreAdapterConfig
from .memory import give_back

__all__ = ["StoreAdapter", "StoreAdapterConfig"]

give_back()
