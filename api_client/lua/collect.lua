-- collect: what has come of a page of jobs; and how long the server keeps those whose answers lie in a file by now.
-- ARGV[3] for so many s [4] so many ids of that kind follow [5] largest reply in bytes; the ids after those are asked about.
-- reply per job asked about: nothing where it is unknown here; '' it is not over, or comes with the next call, for this
-- reply is full; '?' it is over, and no worker has written down its end; '!' its key is no hash; else its result.
local OPEN, FIRST = {scheduled = true, queued = true, running = true}, 6
check_groups(FIRST, 1)
local kept_s, max_bytes = amount(3, 'time to keep', 1, MOST), amount(5, 'largest reply', 0, MOST)
local num_kept = amount(4, 'number of jobs kept', 0, #ARGV - FIRST + 1)
if refusal then return refusal end
local reply, bytes = {}, 0
for place = FIRST, FIRST + num_kept - 1 do redis.call('EXPIRE', job_key(ARGV[place]), whole(kept_s)) end
for place = FIRST + num_kept, #ARGV do
  local job, word = redis.pcall('HMGET', job_key(ARGV[place]), 'state', 'settled', 'result'), ''
  if job.err then
    if not string.find(job.err, 'WRONGTYPE', 1, true) then error(job, 0) end
    word = '!'
  elseif not job[1] then
    word = false
  elseif not OPEN[job[1]] then
    word = job[2] and job[3] or '?'
    if bytes > 0 and bytes + #word > max_bytes then word = '' end
    bytes = bytes + #word
  end
  reply[#reply + 1] = word
end
return reply
