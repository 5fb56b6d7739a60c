-- append: log and publish the chunks of one engine step, all jobs in one call.
--
-- The script needs no common.lua and keeps its values in locals, because it runs for every token,
-- with CPU caches that the engine has emptied.
--
-- Keys       log:, ownership_versions
-- Arguments  KEYS[1]  the queue's meta hash, which routes the call
--            ARGV[1]  key base
--            ARGV[2]  PUBLISH or SPUBLISH
--            ARGV[3]  log TTL, s
--            ARGV[4]  worker
--            ARGV[5]  the ownership version after this call
--            ARGV[6]  one MessagePack array, per chunk: id, token, start, size, how, chunk. It is a
--                     single argument because packing and parsing six arguments per chunk would
--                     cost a worker more than making the chunk.
--   start    the number of the log's last entry before this one; 0 if there is none. A chunk with
--            start 0 restarts the log.
--   size     how much the number grows: by the chunk's tokens, or by one for a chunk that only ends
--            a choice. The entry's id is `<start + size>-0`, so a repeated append finds its chunk,
--            and an append that would leave a gap is refused.
--   how      1: publish the chunk as well. 2: an earlier call has shown this worker that, under
--            this token, the log holds everything before the chunk. 3: both.
-- Reply      empty if every chunk was simply logged. Else three values for each other chunk: its
--            index in the call, a word of tokenmill_worker.jobs.AppendReply, and the number of the
--            log's last entry after the call. If the versions differed, -1, 'version', 0 come
--            before.
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
--
-- The ownership version is a number that each call of a worker raises by one. Every script that
-- changes which jobs a worker owns deletes it (see ownership.lua), and a server that lost its last
-- writes has an older one. If it equals ARGV[5], each job with how >= 2 still belongs to the worker
-- and its log ends at start, so nothing is checked. If not, every job is checked, and the version
-- is set to ARGV[5] if the worker owns any of them.
local base, announce, log_ttl, worker, call, try = ARGV[1] or '', ARGV[2], ARGV[3], ARGV[4],
  redis.call, redis.pcall
local jobs, logs, channels, versions = base .. 'job:', base .. 'log:', base .. 'chunks:',
  base .. 'ownership_versions'
local is_packed, chunks = pcall(cmsgpack.unpack, ARGV[6])
local reply = {}

local function is_whole(value)
  return value and value >= 0 and value <= 2 ^ 53 and value % 1 == 0
end

-- Comparing a value of another type raises an error. That costs less than a call of `type` each.
local function check_chunks()
  -- A map, or a list with a nil in it.
  if next(chunks, #chunks > 0 and #chunks or nil) ~= nil then error('') end
  for first = 1, #chunks, 6 do
    local start, size, how = chunks[first + 2], chunks[first + 3], chunks[first + 4]
    if not (chunks[first] >= '' and chunks[first + 1] >= '' and chunks[first + 5] >= ''
      and start >= 0 and size >= 1 and start + size <= 2 ^ 32 and start % 1 == 0 and size % 1 == 0
      and (how == 3 or how == 1 or how == 2 or how == 0)) then
      error('')
    end
  end
end

-- Returns the name of the first invalid argument. All arguments are checked before the first write.
local function find_bad()
  if KEYS[2] or KEYS[1] ~= base .. 'meta' or not string.find(base, '{[^{}]+}:$') then
    return 'key base'
  end
  if announce ~= 'PUBLISH' and announce ~= 'SPUBLISH' then return 'publish command' end
  if not string.find(log_ttl or '', '^[1-9]%d*$') or not is_whole(tonumber(log_ttl)) then
    return 'log TTL'
  end
  if not worker or worker == '' then return 'worker' end
  if not is_whole(tonumber(ARGV[5])) then return 'ownership version' end
  if not is_packed or type(chunks) ~= 'table' or #chunks % 6 ~= 0 or not pcall(check_chunks) then
    return 'chunks'
  end
end

local bad = find_bad()
if bad then return redis.error_reply('INVALID ' .. bad .. ' in a call of append') end

-- Did the command fail because another program wrote the key? `ask` repeats a command that failed
-- for another reason, so that the script fails with the server's own message.
local function is_wrong_type(trouble)
  for _, words in ipairs({'WRONGTYPE', 'equal or smaller', 'not an integer', 'overflow'}) do
    if string.find(trouble.err, words, 1, true) then return true end
  end
end

local function ask(...)
  local answer = try(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if is_wrong_type(answer) then return nil end
  return call(...)
end

-- Returns the number of a log's last entry, 0 for an empty log, nil if the key is no log.
local function end_of(log)
  local last = ask('XREVRANGE', log, '+', '-', 'COUNT', 1)
  if not last then return nil end
  return last[1] and tonumber(string.match(last[1][1], '^%d+')) or 0
end

-- Deletes a key that holds no log, or another job's: the worker sends the whole answer again.
local function reset_log(log)
  call('DEL', log)
  return 'gap', 0
end

local function has_entry(log, entry, chunk)
  local found = call('XRANGE', log, entry, entry)[1]
  return found and found[2][2] == chunk
end

local function keep(log, start, size)
  if start == 0 or start % 64 + size >= 64 then call('EXPIRE', log, log_ttl) end
end

local function append(id, token, start, size, how, chunk)
  local key, log = jobs .. id, logs .. id
  local job, last = ask('HMGET', key, 'token', 'state', 'cancel'), end_of(log)
  if not job or not job[2] then return 'gone', last or 0 end
  if job[1] ~= token or job[2] ~= 'running' then return 'lost', last or 0 end
  if not last then return reset_log(log) end
  local stop = start + size
  local entry = stop .. '-0'
  if stop <= last and has_entry(log, entry, chunk) then return 'duplicate', last end
  if start == 0 and last > 0 then
    call('DEL', log)
  elseif start ~= last then
    -- Another program has written to the log.
    if stop <= last then return reset_log(log) end
    return 'gap', last
  end
  if not ask('XADD', log, entry, 'chunk', chunk) then return reset_log(log) end
  keep(log, start, size)
  if how % 2 == 1 then call(announce, channels .. id, chunk) end
  return job[3] and 'cancelled' or 'ok', stop
end

local is_current, owns_any = ask('HINCRBY', versions, worker, 1) == tonumber(ARGV[5]), false
local begins = not is_current
if begins then
  try('HDEL', versions, worker)
  reply = {-1, 'version', 0}
end

for first = 1, #chunks, 6 do
  local id, token, start, size, how, chunk = unpack(chunks, first, first + 5)
  if is_current and how >= 2 then
    local log = logs .. id
    local added = try('XADD', log, 'NOMKSTREAM', start + size .. '-0', 'chunk', chunk)
    is_current = added and not added.err
    if is_current then
      keep(log, start, size)
      if how == 3 then call(announce, channels .. id, chunk) end
    end
  end
  if not is_current or how < 2 then
    local word, stop = append(id, token, start, size, how, chunk)
    owns_any = owns_any or (word ~= 'lost' and word ~= 'gone')
    if word ~= 'ok' then
      local size = #reply
      reply[size + 1], reply[size + 2], reply[size + 3] = (first - 1) / 6, word, stop
    end
  end
end
-- A worker that owns no job leaves no key.
if begins and owns_any then try('HSET', versions, worker, ARGV[5]) end
return reply
