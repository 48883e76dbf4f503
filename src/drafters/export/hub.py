"""Exports on the Hugging Face hub."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi

from drafters.errors import ConfigError

log = logging.getLogger(__name__)


def push(folder: Path, repository: str, message: str) -> str:
    """Upload a folder as the hub's model repository, made where there is none; returns its address.

    Raises ConfigError with the hub's answer when it takes neither the name nor the files.
    """
    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message=message)
    except Exception as error:  # the client lets those of its HTTP library out too, whichever that is
        raise ConfigError(
            f"export.push={repository}: {api.endpoint} did not take it ({' '.join(str(error).split())}). Set HF_TOKEN, "
            "or log in with `hf auth login`, with the right to write there, or set export.push to another repository; "
            f"{folder} stays as it is."
        ) from error
    log.info("pushed %s to %s", folder, address)
    return str(address)
