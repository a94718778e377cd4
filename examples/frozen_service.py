"""Serve a frozen model of TensorFlow 1.15 inside a PyTorch program: HTTP requests, answered by threads in parallel.

PyTorch unpacks a camera's frame, the old graph corrects it in place, and PyTorch reads the result in place. Unpack
the wheel of TensorFlow 1.15, and name its folder::

    pip install . torch tensorflow && python examples/frozen_service.py tensorflow-1.15.5/tensorflow_core
"""

import argparse
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

import numpy as np
import torch

import truebridge as tb

SHAPE = (64, 64)  # rows and columns of a frame
GAIN, OFFSET = (np.random.RandomState(1).uniform(low, 1, SHAPE).astype("float32") for low in (0.5, -1))


def frozen() -> bytes:
    """Return a frozen graph, ``y = gain * x + offset``. Yours is a file: ``Path("model.pb").read_bytes()``."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default() as graph:
        tf.add(GAIN * tf.placeholder("float32", SHAPE, name="x"), OFFSET, name="y")
    return bytes(graph.as_graph_def().SerializeToString())


class Service(BaseHTTPRequestHandler):
    """Corrects the frame in a request, bytes of one pixel each, and answers with its brightest pixel."""

    session: tb.tensorflow.v1.Session
    device: str

    def do_POST(self) -> None:
        """Answer one request. The server calls this on a new thread for each."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        frame = torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape(SHAPE).to(self.device) / 255
        fed = tb.convert(frame, "tensorflow1")
        (corrected,) = self.session.run({"x:0": fed})
        y = tb.to_torch(corrected)
        in_place = (fed.address, y.data_ptr()) == (frame.data_ptr(), corrected.address)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"pixel": int(y.argmax()), "value": y.max().item(), "in_place": in_place}).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def main() -> None:
    """Serve on loopback, send requests from several threads, and check every answer."""
    parser = argparse.ArgumentParser(description="Serve a frozen model of TensorFlow 1.15 from PyTorch.")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("tensorflow1", nargs="?", help="its folder (default: TRUEBRIDGE_TENSORFLOW1)")
    version = tb.tensorflow.v1.open((options := parser.parse_args()).tensorflow1)
    frames = np.random.RandomState(2).randint(0, 256, (options.requests, *SHAPE), np.uint8)
    with (
        tb.tensorflow.v1.Session(frozen(), {"x:0": ("float32", SHAPE)}, ["y:0"]) as Service.session,
        ThreadingHTTPServer(("127.0.0.1", 0), Service) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        Service.device = "cuda" if any("/device:GPU:" in name for name in Service.session.devices) else "cpu"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        answers = [json.load(answer) for answer in clients.map(lambda frame: urlopen(url, frame.tobytes()), frames)]
        server.shutdown()
    for right, answer in zip(GAIN * (frames / np.float32(255)) + OFFSET, answers, strict=True):
        assert answer["in_place"] and answer["pixel"] == right.argmax() and abs(answer["value"] - right.max()) < 1e-5
    print(f"TensorFlow {version} answered {len(answers)} requests on tensors of PyTorch on {Service.device}, in place")


if __name__ == "__main__":
    main()
