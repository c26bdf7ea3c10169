"""A hub of data sets on this machine: enough of the Hugging Face Hub's API for its own client to load a mirror."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of every repository
ROUTE = re.compile(
    r"(?P<api>/api)?/datasets/(?P<name>[\w.-]+/[\w.-]+)(/(?P<kind>[\w-]+)/(?P<rev>[^/]+))?/?(?P<path>.*)"
)


@contextmanager
def serving(mirror: Path) -> Iterator[str]:
    """Serve the repositories of a mirror, OWNER/NAME, at the address that is yielded."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            found = ROUTE.fullmatch(unquote(urlsplit(self.path).path))
            root = mirror / found["name"] if found else None
            if not root or not root.is_dir():
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if found["kind"] == "resolve":
                file = root / found["path"]
                if not file.is_file():
                    return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                content = file.read_bytes()
                return self._send(200, content, {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
            if found["kind"] == "tree":
                return self._json(_entries(root, root / found["path"]))
            if found["kind"] == "paths-info":
                wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
                return self._json([_entry(root, root / path) for path in wanted if (root / path).exists()])
            siblings = [{"rfilename": str(file.relative_to(root))} for file in root.rglob("*") if file.is_file()]
            facts = {"_id": "1", "id": found["name"], "sha": COMMIT, "private": False, "gated": False}
            return self._json(facts | {"disabled": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _entries(root: Path, folder: Path) -> list[dict]:
    return [_entry(root, path) for path in sorted(folder.rglob("*"))]


def _entry(root: Path, path: Path) -> dict:
    kind, size = ("directory", 0) if path.is_dir() else ("file", path.stat().st_size)
    return {"type": kind, "oid": "0" * 40, "size": size, "path": path.relative_to(root).as_posix()}
