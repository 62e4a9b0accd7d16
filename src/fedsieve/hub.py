"""Whether the hub can be reached. Its own client would try every file for half a minute before it says that it cannot."""

import functools
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HUB = "https://huggingface.co"
TRIES, PAUSE, PATIENCE = 2, 1.0, 5.0  # seconds


@functools.cache
def is_reachable() -> bool:
    """Asked once. Where it cannot be reached, its libraries are told so: they then take what they have, or fail at once.

    Only where no connection can be made, twice, is it out of reach. A slow hub, or one that answers anything at all, is
    left to the patience of its client.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    for _ in range(TRIES):
        if _connects():
            return True
        time.sleep(PAUSE)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # they read it when they are imported
        if name in sys.modules:
            setattr(sys.modules[name], "HF_HUB_OFFLINE", True)  # noqa: B010
    return False


def _connects() -> bool:
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or HUB, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:  # a name that is not known, a refusal, no route
        return not isinstance(error.reason, OSError) or isinstance(error.reason, (TimeoutError, ssl.SSLError))
    except OSError:  # silence after the connection was made
        return True


def has_weights(backbone: str) -> bool:
    """Whether its client has fetched something of a timm model's weights before, or they are not the hub's."""
    import timm
    from huggingface_hub.constants import HF_HUB_CACHE

    declared = timm.get_pretrained_cfg(backbone, allow_unregistered=True)
    name = declared.hf_hub_id if declared else None
    return name is None or (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()
