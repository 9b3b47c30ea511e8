"""Paths and helpers of the unit tests."""

import pathlib
import sys

REPO = pathlib.Path(__file__).resolve().parents[2]
COLLECTION = REPO / "collections/ansible_collections/sikkatu/kvpersist"
sys.path.insert(0, str(REPO / "collections"))
