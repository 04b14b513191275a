"""Starts a server of MLflow on a free port, prints its address, and ends with its standard input.

    pip install mlflow
    python tools/serve_mlflow.py FOLDER

All that it keeps is in FOLDER.
"""
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # A group of its own: the server has processes of its own, which end with it.
    server = subprocess.Popen(command, cwd=folder, env=os.environ | quiet, stdin=subprocess.DEVNULL,
                              stdout=open(folder / "log.txt", "wb"), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while True:
            try:
                if urllib.request.urlopen(f"{address}/health", timeout=5).status == 200:
                    break
            except OSError:
                if server.poll() is not None:
                    sys.exit((folder / "log.txt").read_text())
                time.sleep(0.2)
        print(address, flush=True)
        sys.stdin.read()
    finally:
        os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
