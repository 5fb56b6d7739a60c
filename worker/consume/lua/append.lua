-- append: log and publish the chunks of one engine step, all jobs in one call. It stands alone, without common.lua, and
-- keeps what it uses in locals: it runs for every token, on caches that the engine has emptied.
-- KEYS[1] the queue's meta hash, which routes the call ARGV[1] the key base [2] PUBLISH or SPUBLISH [3] log TTL s
-- [4] MessagePack, one array: per chunk id, token, index, number of tokens, publish?, ended choice, chunk. One argument:
-- packing and parsing seven for each chunk costs a worker more than making the chunk.
-- reply: nothing where all went as it should; else three values per chunk that did not: its place in the call, a word
-- as in worker.jobs.AppendReply, and the log's end after the call. The entry's id is `<end>-0`; a chunk without tokens
-- ends a choice, once, and gets the next free `<end>-<n>`.
local base, announce, log_ttl, call, try = ARGV[1], ARGV[2], ARGV[3], redis.call, redis.pcall
local jobs, logs, channels = base .. 'job:', base .. 'log:', base .. 'chunks:'
local chunks, reply = cmsgpack.unpack(ARGV[4]), {}

-- Anybody may have written what the job's hash holds: what is no number counts as 0.
local function end_of(value)
  local found = tonumber(value)
  return found and found > -2 ^ 53 and found < 2 ^ 53 and found or 0
end

-- Was it refused for what somebody has made of the key? Other trouble is the server's, and is asked for again, to be raised
-- in its words.
local function is_spoilt(trouble)
  return string.find(trouble.err, 'WRONGTYPE', 1, true) or string.find(trouble.err, 'equal or smaller', 1, true)
end

local function append(id, token, index, count, publishes, ended, chunk)
  local key, log = jobs .. id, logs .. id
  local job = try('HMGET', key, 'token', 'state', 'end', 'cancel')
  if job.err then
    if is_spoilt(job) then return 'lost', 0 end
    job = call('HMGET', key, 'token', 'state', 'end', 'cancel')
  end
  local last = end_of(job[3])
  if job[1] ~= token or job[2] ~= 'running' then return 'lost', last end
  local stop = index + count
  if count > 0 and stop <= last then return 'duplicate', last end
  if count == 0 and call('HEXISTS', key, 'ended:' .. ended) == 1 then return 'duplicate', last end
  if index ~= last then return 'gap', last end
  local place = '-0'
  if count == 0 then
    call('HSET', key, 'ended:' .. ended, last)
    place = '-' .. call('HINCRBY', key, 'num_ends', 1)
  end
  local added = try('XADD', log, stop .. place, 'chunk', chunk)
  if type(added) == 'table' then
    if is_spoilt(added) then  -- its worker has all of it
      call('DEL', log)
      call('HSET', key, 'end', 0)
      return 'gap', 0
    end
    call('XADD', log, stop .. place, 'chunk', chunk)
  end
  if count > 0 then call('HSET', key, 'end', stop) end
  if last == 0 or last % 64 + count >= 64 then call('EXPIRE', log, log_ttl) end
  if publishes then call(announce, channels .. id, chunk) end
  return job[4] and 'cancelled' or 'ok', stop
end

for first = 1, #chunks, 7 do
  local word, stop = append(unpack(chunks, first, first + 6))
  if word ~= 'ok' then
    local size = #reply
    reply[size + 1], reply[size + 2], reply[size + 3] = (first - 1) / 7, word, stop
  end
end
return reply
