"""A hub on this machine: enough of its HTTP interface to make a repository and take a folder."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class FakeHub:
    """files: repository -> path -> bytes, as committed. refuse: status of every answer, as of a hub that says no."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.refuse: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def do_POST(self) -> None:
                path, data = self.path.partition("?")[0], self.body()
                if hub.refuse is not None:
                    self.answer(hub.refuse, {"error": "You have no right to write here"})
                else:
                    self.answer(200, hub.post(path, data))

            def do_GET(self) -> None:
                self.answer(404, {"error": "Repository not found"})

            def do_PUT(self) -> None:
                data = self.body()
                hub.blobs[hashlib.sha256(data).hexdigest()] = data
                self.answer(200, {})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def post(self, path: str, data: bytes) -> Any:
        """The answer to a POST."""
        if path == "/api/repos/create":
            given = json.loads(data)
            repository = "/".join(filter(None, (given.get("organization"), given["name"])))
            self.files.setdefault(repository, {})
            return {"url": f"{self.address}/{repository}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            where = {"actions": {"upload": {"href": f"{self.address}/blob"}}}
            return {"transfer": "basic", "objects": [each | where for each in json.loads(data)["objects"]]}
        repository = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(data)["files"]
            ]
            return {"files": modes}
        assert "/commit/" in path, path
        for line in data.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.files[repository][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[repository][value["path"]] = self.blobs[value["oid"]]
        return {"commitUrl": f"{self.address}/{repository}/commit/1", "commitOid": "1" * 40}

    def close(self) -> None:
        """Stop answering."""
        self.server.shutdown()
        self.server.server_close()
