"""Where the ranks of a test meet: a store that this process serves, as torchrun's agent does.

A port that was found free and is served by rank 0 later may be another program's by then.
"""

from torch.distributed import TCPStore  # type: ignore[attr-defined]

ADDRESS = "127.0.0.1"
OF_STORE = {"MASTER_ADDR": ADDRESS, "TORCHELASTIC_USE_AGENT_STORE": "True"}  # and MASTER_PORT, the store's


def meeting_place() -> TCPStore:
    """Serves as long as somebody holds it; each group of processes needs one of its own."""
    return TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
