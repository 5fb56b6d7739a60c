-- common: what every script begins with: names of keys, the server's clock, and the operations that
-- producers and workers both need.
--
-- Keys       KEYS[1]  the queue's meta hash; it routes the call in a cluster. The head of each
--                     script lists all keys that it writes, without the key base.
-- Arguments  ARGV[1]  the key base
--            ARGV[2]  PUBLISH or SPUBLISH
local meta, base, announce = KEYS[1], ARGV[1] or '', ARGV[2]
local GROUP, READER = 'workers', 'all'
local RANK = {interactive = 0, standard = 1, bulk = 2}
local CLASSES = {'interactive', 'standard', 'bulk'}
local TENANT_TTL_S = 2592000
local ENDS = {'succeeded', 'failed', 'cancelled', 'expired', 'dead'}
local MOST, MOST_COST, MOST_BYTES = 2 ^ 53, 1e12, 1020  -- 255 characters of up to four bytes

-- A script checks every argument before its first write. `refusal` is an error reply that names
-- the first argument that is rejected; the script returns it before it writes anything. `of`: the
-- index of the job in the call.
local refusal

local function refuse(name, rule, value, of)
  if refusal then return end
  local shown = string.gsub(string.sub(tostring(value or 'nothing'), 1, 60), '[^ -~]', '?')
  if of then name = name .. ' of job ' .. of end
  refusal = redis.error_reply('INVALID ' .. name .. ' must be ' .. rule
    .. ", not '" .. shown .. "'")
end

-- Returns an argument as a number; a fraction is rounded up.
local function amount(value, name, least, most, of)
  local found = tonumber(value)
  if found and found >= least and found <= most then return math.ceil(found) end
  refuse(name, string.format('a number from %.0f to %.0f', least, most), value, of)
end

local function one_of(value, name, words, of)
  for _, word in ipairs(words) do
    if value == word then return word end
  end
  refuse(name, 'one of ' .. table.concat(words, ', '), value, of)
end

-- Checks that the arguments from `first` on are groups of `size` each.
local function check_groups(first, size)
  local count = #ARGV - first + 1
  if count >= 0 and count % size == 0 then return end
  refuse('number of arguments', (first - 1) .. ' and a multiple of ' .. size, tostring(#ARGV))
end

local function clock_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Returns a field of a hash as a number. Any client may have written it; a value that is no
-- number counts as `default`.
local function number(value, default)
  local found = tonumber(value or default)
  if found and found > -2 ^ 53 and found < 2 ^ 53 then return found end
  return tonumber(default)
end

-- Returns whether a value is UTF-8 without a zero byte: a text that every language and database
-- can store.
local UTF8 = {
  '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]',
    '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
    '\244[\128-\143][\128-\191][\128-\191]',
}
local function is_text(value, most)
  if #value > most or string.find(value, '%z') then return false end
  if not string.find(value, '[\128-\255]') then return true end
  for _, character in ipairs(UTF8) do value = string.gsub(value, character, ' ') end
  return not string.find(value, '[\128-\255]')
end

-- Returns whether a job in the queue may have this id.
local function is_id(id) return #id > 0 and is_text(id, 255) end

-- Returns whether a new job may have this id.
local function is_name(id) return is_id(id) and not string.find(id, '[\1-\31\127]') end

local function text(value, name, least, of)
  if type(value) == 'string' and #value >= least and is_text(value, MOST_BYTES) then
    return value
  end
  refuse(name, string.format('a UTF-8 text of %d to %d bytes without a zero', least, MOST_BYTES),
    value, of)
end

if #KEYS ~= 1 or meta ~= base .. 'meta' or not string.find(base, '{[^{}]+}:$') then
  refuse('key base', "KEYS[1], the only key, without 'meta', and end in '{queue}:'", base)
elseif announce ~= 'PUBLISH' and announce ~= 'SPUBLISH' then
  refuse('publish command', 'PUBLISH or SPUBLISH', announce)
end
if refusal then return refusal end

local function class_of(value) return RANK[value] and value or 'standard' end
local function whole(value) return string.format('%.0f', value) end
local function exact(value) return string.format('%.17g', value) end
local function job_key(id) return base .. 'job:' .. id end
local function log_key(id) return base .. 'log:' .. id end
local function idem_key(name) return base .. 'idem:' .. name end
local function tenant_key(tenant) return base .. 'tenant:' .. tenant end
local function fair_share_key(class) return base .. 'fair_shares:' .. class end

local function stream_key(class, tenant)
  if tenant == '' then return base .. 'jobs:' .. class end
  return base .. 'jobs:' .. class .. ':' .. tenant
end

-- Encodes the MessagePack of a last chunk: maps of short keys to strings and whole numbers.
local function pack_text(text)
  local size = #text
  if size < 32 then return string.char(0xa0 + size) .. text end
  if size < 256 then return string.char(0xd9, size) .. text end
  return string.char(0xda, math.floor(size / 256) % 256, size % 256) .. text
end

local function pack_whole(number)
  if number < 128 then return string.char(number) end
  local bytes = ''
  for _ = 1, 8 do
    bytes = string.char(number % 256) .. bytes
    number = math.floor(number / 256)
  end
  return string.char(0xcf) .. bytes
end

local WAKE_UP = string.char(0x81) .. pack_text('type') .. pack_text('call')  -- control.WakeUp

-- Notes in `ready` that a worker was woken and is about to claim (see claim.lua): its score is the
-- time, below zero.
local function expect_claim(list, worker, now)
  redis.call('ZADD', base .. 'ready', whole(-now), worker)
  if list == 'ready' then return end
  redis.call('EXPIRE', base .. 'ready', TENANT_TTL_S)
  redis.call('ZREM', base .. list, worker)
end

-- Returns the worker that had the last job of a session; nil if there is none, or it is forgotten.
local function holder_of(session)
  for _, name in ipairs({'sessions', 'old_sessions'}) do
    local worker = redis.pcall('HGET', base .. name, session)
    if type(worker) == 'string' then return worker end
  end
end

-- Wakes one worker if it is listed as idle. Returns for how many jobs it has room; 0: it was not
-- woken by this call.
local function wake_worker(list, worker, now)
  local room = redis.pcall('ZSCORE', base .. list, worker)
  room = type(room) == 'string' and tonumber(room) or 0
  if room <= 0 then return 0 end
  if redis.call(announce, base .. 'control:' .. worker, WAKE_UP) == 0 then
    redis.call('ZREM', base .. list, worker)
    return 0
  end
  expect_claim(list, worker, now)
  return room
end

-- Wakes idle workers, those with most free places first, until `count` have received the message.
-- Returns how many are missing.
local function wake_workers(list, count, now)
  while count > 0 do
    local worker, room = unpack(redis.call('ZRANGE', base .. list, -1, -1, 'WITHSCORES'))
    if not worker or tonumber(room) <= 0 then break end
    if redis.call(announce, base .. 'control:' .. worker, WAKE_UP) > 0 then
      expect_claim(list, worker, now)
      count = count - 1
    else
      redis.call('ZREM', base .. list, worker)
    end
  end
  return count
end

-- Wakes idle workers for jobs that have entered their streams: one worker more than jobs, since one
-- may be frozen. Busy workers claim when they have room.
local function wake_for(num_jobs, num_urgent, now)
  local missing = wake_workers('ready', num_jobs + 1, now)
  wake_workers('ready:urgent', math.min(missing, num_urgent), now)
end

-- Wakes all workers.
local function wake_all(why, now)
  for _, list in ipairs({'ready', 'ready:urgent'}) do
    for _, worker in ipairs(redis.call('ZRANGEBYSCORE', base .. list, '(0', '+inf')) do
      expect_claim(list, worker, now)
    end
  end
  redis.call(announce, base .. 'wake_up', why)
end

local function pack_end(id, index, state, code, message)
  local packed = string.char(code and 0x84 or 0x83) .. pack_text('job_id') .. pack_text(id)
    .. pack_text('index') .. pack_whole(index) .. pack_text('status') .. pack_text(state)
  if not code then return packed end
  return packed .. pack_text('error') .. string.char(0x82)
    .. pack_text('code') .. pack_text(code) .. pack_text('message') .. pack_text(message)
end

-- Starts the TTL of an ended job's idempotency key: its own TTL, but at least as long as the job
-- may be redriven.
local function start_key_clock(id, redrive_s)
  local idem = redis.call('HMGET', job_key(id), 'idem', 'idem_ms')
  if not idem[1] then return end
  local lives_s = math.ceil(number(idem[2], 86400000) / 1000)
  redis.call('EXPIRE', idem_key(idem[1]), whole(math.max(1, lives_s, redrive_s)))
end

-- Returns the number of tokens in a job's log. A key of another type counts as a log without
-- tokens.
local function end_of_log(id)
  local last = redis.pcall('XREVRANGE', log_key(id), '+', '-', 'COUNT', 1)[1]
  return last and number(string.match(last[1], '^%d+'), 0) or 0
end

local function publish_chunk(id, bytes) redis.call(announce, base .. 'chunks:' .. id, bytes) end

-- Adds to the backlog's counters: jobs and estimated tokens, per class.
local function add_queued(class, jobs, cost)
  redis.call('HINCRBY', meta, 'queued:' .. class, jobs)
  redis.call('HINCRBYFLOAT', meta, 'queued_tokens:' .. class, exact(cost))
end

local function count_queued(class, jobs, cost) add_queued(class, jobs, jobs * cost) end

-- Counts a scheduled job as backlog once it is due; until then its hash has `uncounted`. Jobs of
-- older versions are counted when they are submitted, and lack the field.
local function count_due(id, class, cost)
  if redis.call('HDEL', job_key(id), 'uncounted') == 1 then count_queued(class, 1, cost) end
end

-- Adds a tenant's stream to the fair-share index, at the present virtual time or at the one it
-- had when it left, if that is later. So an idle tenant saves up nothing, and leaving briefly
-- loses nothing.
local function activate(class, tenant)
  local index = fair_share_key(class)
  if redis.call('ZSCORE', index, tenant) then return end
  local virtual_time = tonumber(redis.call('HGET', meta, 'served:' .. class) or 0)
  local own = tonumber(redis.call('HGET', tenant_key(tenant), 'served:' .. class) or 0)
  redis.call('ZADD', index, exact(math.max(virtual_time, own)), tenant)
end

-- streams to which this call has added an entry: they exist and are in the index
local entered = {}

local function enter_stream(id, class, tenant)
  local stream = stream_key(class, tenant)
  local is_ready = entered[stream]
  if not is_ready and redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
  local entry = redis.call('XADD', stream, '*', 'job', id)
  redis.call('HSET', job_key(id), 'entry', entry)
  if not is_ready then activate(class, tenant) end
  entered[stream] = true
end

-- Deletes a job's stream entry, delivered or not, and the stream if it belongs to a named tenant
-- and is empty then.
local function leave_stream(id, class, tenant, entry)
  if not entry or entry == '' then return end
  local stream = stream_key(class, tenant)
  redis.pcall('XACK', stream, GROUP, entry)
  redis.pcall('XDEL', stream, entry)
  redis.call('HDEL', job_key(id), 'entry')
  if tenant ~= '' and redis.call('XLEN', stream) == 0 then
    redis.call('DEL', stream)
    entered[stream] = nil
  end
end

-- Requeues a job ahead of all streams: urgent classes first, then the oldest job.
local function requeue_at_head(id, class, created)
  redis.call('ZADD', base .. 'requeued',
    exact((RANK[class] or 1) * 1e13 + math.min(created, 1e13 - 1)), id)
end

-- Returns whether a worker returned the job, or died with it. SQL may already have its end,
-- unacknowledged, and no other end may be set.
local function is_requeued(id) return redis.call('ZSCORE', base .. 'requeued', id) end

-- Removes a held job from the lists of held jobs (sessions.lua).
local function leave_held(id, class, holder)
  redis.pcall('ZREM', base .. 'held:' .. class, id)
  redis.pcall('ZREM', base .. 'held_for:' .. holder, id)
  redis.call('HDEL', job_key(id), 'held')
end

-- Ends a waiting job. Its state changes at once; a worker receives the job later, only to record
-- its end.
local function end_waiting(id, state, code, message, now)
  local key = job_key(id)
  local job = redis.call('HMGET', key, 'class', 'tenant', 'entry', 'cost', 'held')
  local class = class_of(job[1])
  if job[5] then leave_held(id, class, job[5]) end
  leave_stream(id, class, job[2] or '', job[3])
  redis.call('ZREM', base .. 'requeued', id)
  redis.call('ZREM', base .. 'delayed', id)
  redis.call('ZREM', base .. 'deadlines', id)
  redis.call('HSET', key, 'state', state, 'finished_ms', whole(now), 'error_code', code or '',
    'error', message or '')
  redis.call('ZADD', base .. 'unrecorded_ends', whole(now), id)
  if redis.call('HDEL', key, 'uncounted') == 0 then count_queued(class, -1, number(job[4], 0)) end
  publish_chunk(id, pack_end(id, end_of_log(id), state, code, message))
end
