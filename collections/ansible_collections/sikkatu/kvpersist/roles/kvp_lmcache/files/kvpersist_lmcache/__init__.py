"""The store of sikkatu.kvpersist as an L2 adapter of LMCache (``{"type": "plugin"}``)."""

from .adapter import StoreAdapter, StoreAdapterConfig

__all__ = ["StoreAdapter", "StoreAdapterConfig"]
