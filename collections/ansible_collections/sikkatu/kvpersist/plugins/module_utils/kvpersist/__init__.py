"""Model-agnostic core of kvpersist: standard library only, no printing."""
