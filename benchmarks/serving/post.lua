-- A wrk script that posts one file over and over. After "--": the file and its content type.
-- The result is one line of JSON.

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  wrk.body = file:read("*a")
  file:close()
  wrk.method = "POST"
  wrk.headers["Content-Type"] = arguments[2]
end

function done(summary, latency, _)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout
  -- wrk counts in microseconds.
  local line = '{"requests": %d, "seconds": %.4f, "bytes": %d, "refused": %d, "failed": %d, '
    .. '"p50_ms": %.3f, "p90_ms": %.3f, "p99_ms": %.3f, "max_ms": %.3f}'
  print(string.format(line, summary.requests, summary.duration / 1e6, summary.bytes, errors.status, failed,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
