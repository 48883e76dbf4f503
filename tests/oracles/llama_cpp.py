"""llama.cpp in a process of its own: a job as JSON on standard input, the answers as JSON in the file it names.

An abort inside the library would end the tests with it. Needs xllamacpp alone.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp as llama


def main() -> None:
    job = json.load(sys.stdin)
    params = llama.CommonParams()
    params.model.path = job["target"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
    params.warmup, params.fit_params, params.cpuparams.n_threads = False, False, 1
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    if job["drafter"]:
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = params.speculative.draft
        draft.mparams.path = job["drafter"]
        draft.n_max, draft.n_min, draft.p_min = job["drafts"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = 1
    server = llama.Server(params)
    found = {"answers": [], "ids": []}
    for ids in job["prompts"]:
        request = {"prompt": ids, "max_tokens": job["tokens"], "temperature": 0, "cache_prompt": False}
        found["answers"].append(server.handle_completions(request))
    for text in job["texts"]:
        data = json.dumps({"content": text, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", data)
        with urllib.request.urlopen(request) as reply:
            found["ids"].append(json.load(reply)["tokens"])
    Path(job["found"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
