-- append: log and publish the chunks of one engine step, all jobs in one call.
-- ARGV[3] log TTL s, then per chunk: id, token, index, number of tokens, publish?, ended choice or '', chunk
-- reply: per chunk a word and the log's end after the call, as in worker.jobs.AppendReply. The entry's id is
-- `<end>-0`; a chunk without tokens ends a choice, once, and gets the next free `<end>-<n>`.
local log_ttl, reply = ARGV[3], {}

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
  if publishes == '1' then publish_chunk(id, chunk) end
  return job[4] and 'cancelled' or 'ok', stop
end

for first = 4, #ARGV, 7 do
  local word, stop = append(ARGV[first], ARGV[first + 1], tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3]),
    ARGV[first + 4], ARGV[first + 5], ARGV[first + 6])
  reply[#reply + 1] = word
  reply[#reply + 1] = stop
end
return reply
