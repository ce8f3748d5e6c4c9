#!/bin/bash
# The deployment of compose.yaml and compose.hosts.yaml with a Docker engine, on this machine: a front
# and two hosts with engines on the CPU, each a Compose project of its own, with CURVE keys.
#
#   tests/deploy/compose.sh
#
# A line for each check; ends with 1 if one fails. Leaves images, and nothing else. Needs bash and
# Docker with its plugins compose and buildx; takes seven minutes on two cores, and what images take.
#
#   BUILD=no              takes the images that are there
#   EXTRA_OVERRIDE=FILE   one more Compose file for all three
#   SUBNET=10.78.0        the network that the three meet in
#   LOGS=FOLDER           gets what the containers have logged
#
# For the network of its host each container gets that of the service `host`, which each project has.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
unset "${!PIPEINFER_@}" "${!COMPOSE_@}"
subnet=${SUBNET:-10.78.0} logs=${LOGS:-} more=${EXTRA_OVERRIDE:-}
tag=pi-try-$$
work=$(mktemp -d)
hosts=(front gpu-a gpu-b)
front=$subnet.11 gpu_a=$subnet.12 gpu_b=$subnet.13
failed=0

# --- words

check() {  # check WHAT COMMAND...: a line, with what the command printed
  local said verdict="ok  "
  said=$("${@:2}" 2>&1) || verdict=FAIL failed=1
  echo "$verdict  $1${said:+: ${said//$'\n'/; }}"
}
within() {  # within SECONDS COMMAND...: waits until the command succeeds
  local end=$((SECONDS + $1)) said
  until said=$("${@:2}" 2>&1); do
    if [ "$SECONDS" -ge "$end" ]; then echo "not within $1 s: ${said:0:300}"; return 1; fi
    sleep 0.5
  done
}
on() {  # on HOST WORD...: docker compose for the project of that host
  local profile=gpu
  [ "$1" = front ] && profile=front
  docker compose --progress quiet -p "$tag-$1" --env-file "$work/$1.env" -f compose.yaml \
    -f compose.hosts.yaml -f "$work/override.yaml" ${more:+-f "$more"} --profile "$profile" "${@:2}"
}
container() { echo "$tag-$1-$2-1"; }  # container HOST SERVICE
inside() { docker exec "$(container "$1" "$2")" "${@:3}"; }  # inside HOST SERVICE WORD...
each() {  # each COMMAND...: with HOST and SERVICE behind it, for every container of a stage
  local host service
  for host in "${hosts[@]}"; do
    for service in $(on "$host" config --services); do
      [ "$service" = host ] || "$@" "$host" "$service" || { echo "not $host $service"; return 1; }
    done
  done
}
beside() {  # beside WORD...: docker run, of a machine that is none of the three; runs as user 1000
  docker run --network "$tag" --label "$tag" -v "$work/secrets:/secrets:ro" \
    -v "$PWD/tests/deploy/compose_client.py:/client.py:ro" "$@"
}
get() {  # get PATH [KEY]: the body; fails unless the status is 200
  beside --rm pipeinfer:slim python -c '
import sys, urllib.request as u
asked = u.Request(sys.argv[1], headers={"authorization": "Bearer " + sys.argv[2]})
try:
    print(u.urlopen(asked, timeout=20).read().decode())
except OSError as error:
    sys.exit(str(error))
' "http://$front:8000$1" "${2:-none}"
}
metric() { get /metrics | awk -v name="$1" '$1 == name {print $2}'; }  # metric 'NAME{LABELS}'
finds() { grep -c "$@" > "$work/found"; }  # reads all there is: with -q the writer would fail
says() { docker logs "$1" 2>&1 | finds -e "$2"; }  # says CONTAINER TEXT

under_streams() {  # under_streams WHAT "FLAGS of compose_client.py" COMMAND...: does it amid streams
  local name=$tag-streams flags said
  read -ra flags <<< "$2"
  docker rm -fv "$name" > "$work/removed" 2>&1
  beside -d --name "$name" pipeinfer:slim python /client.py "http://$front:8000" \
    --key-file /secrets/api_key "${flags[@]}" > "$work/client"
  if ! said=$(within 180 says "$name" "under way"); then
    echo "FAIL  $1: in calm already: $said; $(docker logs --tail 3 "$name" 2>&1)"
    failed=1
    return
  fi
  sleep 2  # so that streams are in their midst
  docker kill -s USR1 "$name" > "$work/client"
  check "$1" "${@:3}"
  docker kill -s TERM "$name" > "$work/client"
  check "$1, the streams" ended_well "$name"
}
ended_well() {
  local code
  code=$(timeout 300 docker wait "$1")
  docker logs --tail 6 "$1" 2>&1 | grep -v "under way"
  [ "$code" = 0 ]
}

# --- however it ends

end() {
  trap - EXIT
  trap '' INT TERM
  local one host
  if [ -n "$logs" ]; then
    mkdir -p "$logs"
    for one in $(docker ps -a --filter "name=$tag" --format '{{.Names}}'); do
      docker logs "$one" > "$logs/$one.log" 2>&1
    done
  fi
  docker ps -aq --filter "label=$tag" | xargs -r docker rm -fv > "$work/removed"
  for host in "${hosts[@]}"; do
    [ ! -e "$work/$host.env" ] || on "$host" down -v -t 0 --remove-orphans
  done
  [ ! -e "$work/secrets" ] || docker run --rm -u 0 -v "$work:/work" pipeinfer:slim rm -r /work/secrets
  [ -z "$(docker network ls -q --filter "name=$tag")" ] || docker network rm "$tag" > "$work/removed"
  check "no container, network or volume is left" nothing_left
  rm -rf "$work"
  exit "$failed"
}
nothing_left() {  # nor volumes without a name
  local left
  left=$(docker ps -aq --filter "name=$tag"; docker network ls -q --filter "name=$tag"
    docker volume ls -q | sort | comm -13 "$work/volumes" -)
  echo "$left"
  [ -z "$left" ]
}
docker volume ls -q | sort > "$work/volumes" || exit 1
trap end EXIT
trap 'failed=1; exit' INT TERM

# --- images

[ "${BUILD:-yes}" = no ] || docker compose build --quiet || { failed=1; exit; }
size() { docker image inspect -f '{{.Size}}' "$1"; }
own_mb() { echo $((($(size "$1") - $(size python:3.11-slim)) / 1000000)); }
at_most() { echo "$1 MB"; [ "$1" -le "$2" ]; }
check "the slim image's own layers have at most 220 MB" at_most "$(own_mb pipeinfer:slim)" 220
check "the cpu image's own layers" echo "$(own_mb pipeinfer) MB"
check "the base" echo "$(($(size python:3.11-slim) / 1000000)) MB"

# --- three hosts

docker network create --subnet "$subnet.0/24" "$tag" > "$work/made" || { failed=1; exit; }
docker run --rm -u 0 -v "$work:/work" pipeinfer:slim sh -ec '
  umask 077; mkdir /work/secrets; cd /work/secrets
  pipeinfer keys --out right; pipeinfer keys --out wrong
  python -c "import secrets; print(secrets.token_hex(32))" > api_key
  chown -R 1000:1000 .' > "$work/made" || { failed=1; exit; }
key=$(docker run --rm -v "$work/secrets:/secrets:ro" pipeinfer:slim cat /secrets/api_key)
curve=$(docker run --rm -v "$work/secrets:/secrets:ro" pipeinfer:slim cat /secrets/right/pipeinfer.key)
cat > "$work/override.yaml" <<END
x-stage: &stage
  network_mode: service:host
  mem_limit: 768m
  memswap_limit: 768m
  pids_limit: 200
services:
  host:
    image: pipeinfer:slim
    pull_policy: never
    command: [python, -c, "import signal; signal.pause()"]
    stop_signal: SIGKILL
    tmpfs: [/run/pipeinfer, /var/lib/pipeinfer]  # no volumes
    networks: {between: {ipv4_address: "\${ADDRESS}"}}
  gateway:
    <<: *stage
    environment: {PIPEINFER_DRAIN_TIMEOUT: "2"}  # so that streams live longer than their gateway
  tokenizer: *stage
  detokenizer: *stage
  scheduler: *stage
  engine:
    <<: *stage
    mem_limit: 2g
    memswap_limit: 2g
    environment: {OMP_NUM_THREADS: "1"}
  memory:
    pids_limit: 200
    mem_limit: 768m
networks:
  between: {name: $tag, external: true}
END
environment() {  # environment HOST ADDRESS KEY: its .env, as .env.example has it
  cat <<END
FRONT=$front
GPU_A=$gpu_a
GPU_B=$gpu_b
$(sed -n 's/^#PIPEINFER_STAGES=/PIPEINFER_STAGES=/p' .env.example)
THIS_HOST=$1
ADDRESS=$2
CURVE_KEY_FILE=$work/secrets/$3/pipeinfer.key
API_KEY_FILE=$work/secrets/api_key
PIPEINFER_HOST=0.0.0.0
PIPEINFER_ROUTING=round-robin
END
}
environment front "$front" right > "$work/front.env"
environment gpu-a "$gpu_a" right > "$work/gpu-a.env"
environment gpu-b "$gpu_b" right > "$work/gpu-b.env"

all_come_up() {
  local host begun=$SECONDS
  on front up -d && on gpu-a up -d && on gpu-b up -d || return 1
  within 180 get /health/ready || return 1
  echo "ready after $((SECONDS - begun)) s"
  for host in "${hosts[@]}"; do on "$host" up -d --wait || return 1; done
  echo "all healthy after $((SECONDS - begun)) s"
}
check "three hosts come up" all_come_up
both_serve() {
  local group count
  for group in 0 1; do
    count=$(metric "pipeinfer_step_tokens_count{group=\"$group\"}")
    echo "group $group: ${count:-0} steps"
    [ "${count%.*}" -gt 0 ] || return 1
  done
}
under_streams "chats stream" "" true
check "both groups serve" both_serve

# --- what a container may

refused() {  # refused WHY COMMAND...: fails, and says why
  local said
  said=$("${@:2}" 2>&1) && { echo "it was not refused"; return 1; }
  echo "$said" | grep -m 1 -- "$1" || { echo "refused otherwise: $said"; return 1; }
}
check "the API key opens" within 1 get /v1/models "$key"
check "another key does not" refused 401 get /v1/models "${key}0"
check "no key does not" refused 401 get /v1/models
is_private() { [ "$(inside "$1" "$2" stat -c '%a %u' /run/secrets/pipeinfer.key)" = "600 1000" ]; }
check "the CURVE key is a file of user 1000 with mode 600" each is_private
check "so is the API key" test \
  "$(inside front gateway stat -c '%a %u' /run/secrets/api_key)" = "600 1000"
tells_no_key() {
  ! { docker inspect "$(container "$1" "$2")"; docker logs "$(container "$1" "$2")"; } 2>&1 |
    finds -F -e "$key" -e "$curve"
}
check "no environment and no log has a key" each tells_no_key
has_no_rights() {
  [ "$(inside "$1" "$2" grep -cE '^(Cap...:.0{16}|NoNewPrivs:.1)$' /proc/1/status)" = 6 ] &&
    [ "$(inside "$1" "$2" id -u)" = 1000 ]
}
check "every container is user 1000, without capabilities and new privileges" each has_no_rights
is_read_only() {
  local place
  for place in 0/ 0/usr/ 0/etc/ 0/opt/pipeinfer/ 1000/home/pipeinfer/ 1000/var/cache/pipeinfer/; do
    refused "Read-only" docker exec -u "${place%%/*}" "$(container "$1" "$2")" touch "/${place#*/}x" \
      > "$work/refused" || { cat "$work/refused"; return 1; }
  done
  inside "$1" "$2" sh -ec 'cd /tmp; for one in . /run/pipeinfer /var/lib/pipeinfer; do
    touch $one/x; rm $one/x
  done'
}
check "every root is read-only; volumes and /tmp are not" each is_read_only
missed_nothing() { ! says "$(container "$1" "$2")" 'Read-only file\|Permission den\|Traceback'; }
check "nothing missed the right to write" each missed_nothing
cannot_have() {  # cannot_have WHY CODE: Python in gpu-a's scheduler, which goes on
  local name; name=$(container gpu-a scheduler)
  refused "$1" sh -c 'docker exec "$0" python -c "$1" || { echo "exit code $?"; false; }' "$name" "$2" &&
    [ "$(docker inspect -f '{{.RestartCount}} {{.State.Running}}' "$name")" = "0 true" ]
}
check "a container gets no more than 768 MB" cannot_have "exit code 137" 'b"x" * (1 << 30)'
check "a container gets no more than 200 tasks" cannot_have "can't start new thread" '
import threading, time
for _ in range(300): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()'

# --- upgrades under streams

replace() {  # replace HOST SERVICE...: as after a new image
  local before after begun=$SECONDS
  before=$(on "$1" ps -q "${@:2}") || return 1
  on "$1" up -d --force-recreate --wait "${@:2}" || return 1
  after=$(on "$1" ps -q "${@:2}")
  ! grep -qxF "$before" <<< "$after" || { echo "the same container"; return 1; }
  echo "healthy after $((SECONDS - begun)) s"
}
replace_front() {  # the gateway ends what it has while the others still work
  on front stop gateway && replace front gateway tokenizer detokenizer
}
under_streams "the detokenizer is replaced" "--hit 1" replace front detokenizer
under_streams "the tokenizer is replaced" "--tokens 200" replace front tokenizer
under_streams "the gateway is replaced" "--resumed --hit 1" replace front gateway
under_streams "all of the front is replaced" "--resumed --hit 1" replace_front
under_streams "scheduler and engine of gpu-a are replaced" "--hit 1" replace gpu-a scheduler engine
check "both groups serve" both_serve

# --- a host is lost

lose() {  # all containers of gpu-b at once, for good
  on gpu-b ps -q | xargs docker kill > "$work/removed" || return 1
  within 60 is_down engine-1-0
}
is_down() { [ "$(metric "pipeinfer_stage_up{stage=\"$1\"}")" = 0.0 ]; }  # is_down STAGE
under_streams "gpu-b is killed" "--hit 1" lose
check "gpu-b is not there" test -z "$(on gpu-b ps -q)"
check "the others are ready" get /health/ready
under_streams "chats stream without gpu-b" "" true

# --- a host with another CURVE key

environment gpu-b "$gpu_b" wrong > "$work/gpu-b.env"
stays_out() {
  on gpu-b up -d --force-recreate || return 1
  within 120 says "$(container front tokenizer)" "handshakes refused" || return 1
  is_down scheduler-1 && is_down engine-1-0
}
check "a host with another CURVE key stays out" stays_out
under_streams "chats stream beside it" "" true
