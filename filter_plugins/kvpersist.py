"""Short names of the collection's filters for the playbooks of this repository."""

from ansible_collections.sikkatu.kvpersist.plugins.filter.kvpersist import FilterModule

__all__ = ["FilterModule"]
