-- collect: return the results of a page of jobs, and set a TTL on jobs whose answers are in a
-- file already.
--
-- Keys       job:
-- Arguments  ARGV[3]  TTL of jobs in a file, s
--            ARGV[4]  number of these jobs
--            ARGV[5]  largest reply, bytes
--            then their ids, then the ids of the page
-- Reply      per job of the page nil: unknown; '': not over, or left for the next call because this
--            reply is full; '?': over, but not recorded by a worker; '!': the key is no hash; else
--            the result
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local OPEN, FIRST = {scheduled = true, queued = true, running = true}, 6
check_groups(FIRST, 1)
local kept_s = amount(ARGV[3], 'time to keep', 1, MOST)
local num_kept = amount(ARGV[4], 'number of jobs kept', 0, #ARGV - FIRST + 1)
local max_bytes = amount(ARGV[5], 'largest reply', 0, MOST)
if refusal then return refusal end
local reply, bytes = {}, 0
for place = FIRST, FIRST + num_kept - 1 do
  redis.call('EXPIRE', job_key(ARGV[place]), whole(kept_s))
end
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
