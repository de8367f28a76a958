"""A program that replaces `vllm serve`, and runs a `ScriptedServer` on the given port.

It logs its command line and environment, and then each request, as lines of JSON in the file
STAND_IN_LOG. STAND_IN selects a fault: "dies" (at the start), "mute" (no port is opened) or "stops"
(at the third batch).
"""

import argparse
import json
import os
import sys
import threading
import time

from scripted_server import Reply, ScriptedServer, Seen

parser = argparse.ArgumentParser()
parser.add_argument("serve")
parser.add_argument("model")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--max-model-len", type=int)
options, _ = parser.parse_known_args()
mode = os.environ.get("STAND_IN", "")


def record(entry: dict) -> None:
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        file.write(json.dumps(entry) + "\n")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Server(ScriptedServer):
    def reply_to(self, seen: Seen, method: str) -> Reply:
        if seen.path != "/health":
            record({"path": seen.path, "body": seen.body, "port": self.port})
        loads = [each for each in self.requests if each.path == "load_lora_adapter"]
        if mode == "stops" and len(loads) == 3:
            say("ValueError: the card is on fire")
            os._exit(7)
        return super().reply_to(seen, method)


record({"path": "", "argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)})
say(f"loading {options.model}")
if mode == "dies":
    raise SystemExit("ValueError: Free memory on device is less than desired")
if mode == "mute":
    time.sleep(60)
server = Server()
server.port, server.key = options.port, os.environ["VLLM_API_KEY"]
server.max_model_len = options.max_model_len
with server:
    threading.Event().wait(60)  # a test stops the server earlier
