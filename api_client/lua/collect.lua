-- collect: what has come of a page of jobs; and how long the server keeps those whose answers lie in a file by now.
-- ARGV[3] for so many s [4] so many ids of that kind follow [5] largest reply in bytes; the ids after those are asked about.
-- reply per job asked about: nothing where it is unknown here; '' it is not over, or comes with the next call, for this
-- reply is full; '?' it is over, and no worker has written down its end; else its result.
local kept_s, num_kept, max_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local OPEN, FIRST = {scheduled = true, queued = true, running = true}, 6
local reply, bytes = {}, 0
for place = FIRST, FIRST + num_kept - 1 do redis.call('EXPIRE', job_key(ARGV[place]), kept_s) end
for place = FIRST + num_kept, #ARGV do
  local job, word = redis.call('HMGET', job_key(ARGV[place]), 'state', 'settled', 'result'), ''
  if not job[1] then
    word = false
  elseif not OPEN[job[1]] then
    word = job[2] and job[3] or '?'
    if bytes > 0 and bytes + #word > max_bytes then word = '' end
    bytes = bytes + #word
  end
  reply[#reply + 1] = word
end
return reply
