"""vLLM plugin: a client that goes away while its chat is loaded costs nobody anything.

With vLLM 0.32.0 and LMCache 0.5.6 such a request is reported as stored at once and as loaded later.
The first report frees its blocks, which the load still writes to: another request may get them, and
with them wrong KV. The second one is of a request that vLLM does not know any more: an assertion ends
the engine (vLLM issues 43226 and 46240). Both ends are repaired here; nothing else is touched.

vLLM calls `register` in each of its processes (entry point of the group ``vllm.general_plugins``).
"""

import functools
import logging
import os

logger = logging.getLogger("vllm.kvpersist")


def once(get_finished):
    """LMCacheMPWorkerAdapter.get_finished that reports a request that ended while it was loaded as loaded alone.

    And not before what it still has to store is stored: either report frees its blocks.
    """

    @functools.wraps(get_finished)
    def wrapped(self, finished_req_ids_from_engine):
        held, late = self.__dict__.setdefault("_kvp_state", (set(), set()))
        loading = self.retrieve_futures.keys() | self._dropped_retrieves
        held.update(finished_req_ids_from_engine & loading)
        stored, loaded = get_finished(self, finished_req_ids_from_engine - held)
        late.update((loaded or set()) & held)
        ready = {request for request in late if request not in self.store_futures}
        late -= ready
        held -= ready
        return (stored or set()) - held - ready, ((loaded or set()) - late) | ready

    return wrapped


def known(update):
    """Scheduler._update_from_kv_xfer_finished that hears of requests that it has, and of each once."""

    @functools.wraps(update)
    def wrapped(self, output):
        loaded = {request for request in output.finished_recving or () if request in self.requests}
        freed = {request for request in loaded if self.requests[request].is_finished()}
        stored = {request for request in output.finished_sending or () if request in self.requests} - freed
        output.finished_recving, output.finished_sending = loaded, stored
        return update(self, output)

    return wrapped


def repair():
    """Repair both ends, in this process. Says so when they are not as expected."""
    try:
        from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
        from vllm.v1.core.sched.scheduler import Scheduler

        if hasattr(Scheduler._update_from_kv_xfer_finished, "__wrapped__"):
            return
        LMCacheMPWorkerAdapter.get_finished = once(LMCacheMPWorkerAdapter.get_finished)
        Scheduler._update_from_kv_xfer_finished = known(Scheduler._update_from_kv_xfer_finished)
        logger.info("kvpersist: repaired what a client that goes away does")
    except (ImportError, AttributeError) as error:
        logger.warning("kvpersist: clients that go away while their chat is loaded may end vLLM: %r", error)


def register():
    """Repair once a connector is made: imported earlier than vLLM does it, these modules change how it starts."""
    if os.environ.get("KVP_CACHING") != "1":
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector

    def create_connector(*words, **named):
        connector = create(*words, **named)
        repair()
        return connector

    KVConnectorFactory.create_connector = staticmethod(create_connector)
