-- append: log and publish the chunks of one engine step, all jobs in one call.
-- ARGV[3] log TTL s [4] MessagePack, one array: per chunk id, token, index, number of tokens, publish?, ended choice,
-- chunk. One argument: packing and parsing seven for each chunk costs a worker more than making the chunk.
-- reply: nothing where all went as it should; else three values per chunk that did not: its place in the call, a word
-- as in worker.jobs.AppendReply, and the log's end after the call. The entry's id is `<end>-0`; a chunk without tokens
-- ends a choice, once, and gets the next free `<end>-<n>`.
local log_ttl, chunks, reply = ARGV[3], cmsgpack.unpack(ARGV[4]), {}

local function append(id, token, index, count, publishes, ended, chunk)
  local key = job_key(id)
  local job = redis.call('HMGET', key, 'token', 'state', 'end', 'cancel')
  if job[1] ~= token or job[2] ~= 'running' then return 'lost', number(job[3], 0) end
  local last = number(job[3], 0)
  local stop = index + count
  if count > 0 and stop <= last then return 'duplicate', last end
  if count == 0 and redis.call('HEXISTS', key, 'ended:' .. ended) == 1 then return 'duplicate', last end
  if index ~= last then return 'gap', last end
  local place = '-0'
  if count == 0 then
    redis.call('HSET', key, 'ended:' .. ended, last)
    place = '-' .. redis.call('HINCRBY', key, 'num_ends', 1)
  end
  redis.call('XADD', log_key(id), whole(stop) .. place, 'chunk', chunk)
  if last == 0 or math.floor(last / 64) ~= math.floor(stop / 64) then redis.call('EXPIRE', log_key(id), log_ttl) end
  if count > 0 then redis.call('HSET', key, 'end', whole(stop)) end
  if publishes then publish_chunk(id, chunk) end
  return job[4] and 'cancelled' or 'ok', stop
end

for place = 0, #chunks / 7 - 1 do
  local first = 7 * place
  local word, stop = append(chunks[first + 1], chunks[first + 2], chunks[first + 3], chunks[first + 4],
    chunks[first + 5], chunks[first + 6], chunks[first + 7])
  if word ~= 'ok' then
    local size = #reply
    reply[size + 1], reply[size + 2], reply[size + 3] = place, word, stop
  end
end
return reply
