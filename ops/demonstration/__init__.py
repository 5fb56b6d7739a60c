"""The program behind `ops/demo`: runs the real parts on a small scale and shows what they do."""
