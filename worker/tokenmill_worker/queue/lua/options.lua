-- Part of claim and heartbeat: reads their options by name. ARGV[3] is one MessagePack map;
-- an argument for each name and value would cost 5 % of a claim.
local is_packed, options = pcall(cmsgpack.unpack, ARGV[3])
if not is_packed or type(options) ~= 'table' then
  refuse('options', 'one MessagePack map', ARGV[3])
  return refusal
end
