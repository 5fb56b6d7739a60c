-- append: log and publish the chunks of one engine step, all jobs in one call. It stands alone, without common.lua, and
-- keeps what it uses in locals: it runs for every token, on caches that the engine has emptied.
-- KEYS[1] the queue's meta hash, which routes the call ARGV[1] the key base [2] PUBLISH or SPUBLISH [3] log TTL s
-- [4] worker [5] what its voucher becomes by this call [6] MessagePack, one array: per chunk id, token, index, number of
-- tokens, how, ended choice, chunk. One argument: packing and parsing seven for each chunk costs a worker more than making it.
-- How: 1 it is published as well as logged; 2 the worker has seen that the log has all before it, under this token, in a
-- call since which its voucher holds; 3 both.
-- The voucher: a number that each call of a worker counts up by one. Who changes what a worker holds deletes it (see hands.lua),
-- and a server that has lost its last moments has an older one. So where it is what the worker expects, a job of kind 2 is
-- the worker's still, and its log ends where the worker believes: nothing is asked of it. Where it is not, every job is asked
-- for, and the voucher begins here, if any is the worker's.
-- reply: nothing where all went as it should; else three values per chunk that did not: its place in the call, a word
-- as in worker.jobs.AppendReply, and the log's end after the call; before them -1, 'voucher', 0 where it did not hold. An
-- entry's id is `<end>-0`; a chunk without tokens ends a choice, once, and gets the next free `<end>-<n>`.
local base, announce, log_ttl, worker, call, try = ARGV[1] or '', ARGV[2], ARGV[3], ARGV[4], redis.call, redis.pcall
local jobs, logs, channels, vouchers = base .. 'job:', base .. 'log:', base .. 'chunks:', base .. 'vouchers'
local is_packed, chunks = pcall(cmsgpack.unpack, ARGV[6])
local reply = {}

local function is_whole(value) return value and value >= 0 and value <= 2 ^ 53 and value % 1 == 0 end

-- Raises for a value of another type, as every comparison does: that costs less than a call of `type` for each.
local function check_chunks()
  if next(chunks, #chunks > 0 and #chunks or nil) ~= nil then error('') end  -- a map, or a nil within
  for first = 1, #chunks, 7 do
    local index, count, how, ended = chunks[first + 2], chunks[first + 3], chunks[first + 4], chunks[first + 5]
    if not (chunks[first] >= '' and chunks[first + 1] >= '' and chunks[first + 6] >= ''
      and index >= 0 and count >= 0 and index + count <= 2 ^ 32 and index % 1 == 0 and count % 1 == 0
      and (how == 3 or how == 1 or how == 2 or how == 0) and ended >= 0 and ended <= 2 ^ 32 and ended % 1 == 0) then
      error('')
    end
  end
end

-- The name of the first argument that is refused. All are checked before the first write.
local function find_bad()
  if KEYS[2] or KEYS[1] ~= base .. 'meta' or not string.find(base, '{[^{}]+}:$') then return 'key base' end
  if announce ~= 'PUBLISH' and announce ~= 'SPUBLISH' then return 'publish command' end
  if not string.find(log_ttl or '', '^[1-9]%d*$') or not is_whole(tonumber(log_ttl)) then return 'log TTL' end
  if not worker or worker == '' then return 'worker' end
  if not is_whole(tonumber(ARGV[5])) then return 'voucher' end
  if not is_packed or type(chunks) ~= 'table' or #chunks % 7 ~= 0 or not pcall(check_chunks) then return 'chunks' end
end

local bad = find_bad()
if bad then return redis.error_reply('INVALID ' .. bad .. ' in a call of append') end

-- Was it refused for what somebody has made of the key? Other trouble is the server's, and is asked for again, to be raised
-- in its words.
local function is_spoilt(trouble)
  for _, words in ipairs({'WRONGTYPE', 'equal or smaller', 'not an integer', 'overflow'}) do
    if string.find(trouble.err, words, 1, true) then return true end
  end
end

local function ask(...)
  local answer = try(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if is_spoilt(answer) then return nil end
  return call(...)
end

-- Where a log ends; nothing where somebody has put something else in its place.
local function end_of(log)
  local last = ask('XREVRANGE', log, '+', '-', 'COUNT', 1)
  if not last then return nil end
  return last[1] and tonumber(string.match(last[1][1], '^%d+')) or 0
end

-- What is there is no log, or another's, or nothing: the job's worker has all of it.
local function begin_again(key, log)
  call('DEL', log)
  for _, field in ipairs(call('HKEYS', key)) do
    if string.sub(field, 1, 6) == 'ended:' then call('HDEL', key, field) end
  end
  return 'gap', 0
end

local function is_there(log, place, chunk)
  local found = call('XRANGE', log, place, place)[1]
  return found and found[2][2] == chunk
end

local function keep(log, index, count) if index == 0 or index % 64 + count >= 64 then call('EXPIRE', log, log_ttl) end end

local function append(id, token, index, count, how, ended, chunk)
  local key, log = jobs .. id, logs .. id
  local job, last = ask('HMGET', key, 'token', 'state', 'cancel'), end_of(log)
  if not job or job[1] ~= token or job[2] ~= 'running' then return 'lost', last or 0 end
  if not last then return begin_again(key, log) end
  local stop, place = index + count, '-0'
  if count > 0 and stop <= last then  -- told before, unless somebody has written behind the log's end
    if is_there(log, stop .. place, chunk) then return 'duplicate', last end
    return begin_again(key, log)
  end
  if count == 0 and call('HEXISTS', key, 'ended:' .. ended) == 1 then return 'duplicate', last end
  if index ~= last then
    if last == 0 then return begin_again(key, log) end
    return 'gap', last
  end
  if count == 0 then
    call('HSET', key, 'ended:' .. ended, last)
    place = '-' .. call('HINCRBY', key, 'num_ends', 1)
  end
  if not ask('XADD', log, stop .. place, 'chunk', chunk) then return begin_again(key, log) end
  keep(log, index, count)
  if how % 2 == 1 then call(announce, channels .. id, chunk) end
  return job[3] and 'cancelled' or 'ok', stop
end

local is_vouched, is_holder = ask('HINCRBY', vouchers, worker, 1) == tonumber(ARGV[5]), false
local begins = not is_vouched
if begins then
  try('HDEL', vouchers, worker)
  reply = {-1, 'voucher', 0}
end

for first = 1, #chunks, 7 do
  local id, token, index, count, how, ended, chunk = unpack(chunks, first, first + 6)
  if is_vouched and how >= 2 then
    local log, stop = logs .. id, index + count
    local added = try('XADD', log, 'NOMKSTREAM', stop .. '-0', 'chunk', chunk)
    is_vouched = added and not added.err
    if is_vouched then
      keep(log, index, count)
      if how == 3 then call(announce, channels .. id, chunk) end
    end
  end
  if not is_vouched or how < 2 then
    local word, stop = append(id, token, index, count, how, ended, chunk)
    is_holder = is_holder or word ~= 'lost'
    if word ~= 'ok' then
      local size = #reply
      reply[size + 1], reply[size + 2], reply[size + 3] = (first - 1) / 7, word, stop
    end
  end
end
if begins and is_holder then try('HSET', vouchers, worker, ARGV[5]) end  -- who holds nothing leaves nothing
return reply
