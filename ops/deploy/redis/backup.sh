#!/bin/sh
# Writes a copy of the server's data to standard output, as a tar archive, while the server runs. In its container:
#   docker compose exec -T redis sh /etc/tokenmill/backup.sh > redis.tar
# The log must not be rewritten meanwhile. What is appended during the copy may be in it or not, as after a crash.
set -eu
program=$(command -v valkey-cli || command -v redis-cli)
cli() { "$program" --no-auth-warning --user operator --pass "$OPERATOR" "$@"; }
percentage=$(cli config get auto-aof-rewrite-percentage | tail -n 1)
finish() {
  rm -rf /data/copy
  cli config set auto-aof-rewrite-percentage "$percentage" >&2
}
trap finish EXIT
cli config set auto-aof-rewrite-percentage 0 >&2
while cli info persistence | grep -q -e aof_rewrite_in_progress:1 -e aof_rewrite_scheduled:1; do sleep 1; done
mkdir /data/copy
cp -R /data/appendonlydir /data/copy
tar -C /data/copy -cf - appendonlydir
