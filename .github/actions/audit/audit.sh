#!/usr/bin/env bash
# Audits each path of AUDIT_PATHS with the options of AUDIT_OPTIONS, one a line: reports to AUDIT_REPORTS, what was found
# to the job's log and summary. Inputs come by the environment, so none of them is ever a command.
set -uo pipefail

# Paths are relative to the checked repository, so this runs in it; but no module is imported from there.
unset "${!PYTHON@}"
export PYTHONSAFEPATH=1

mapfile -t paths < <(printf '%s\n' "$AUDIT_PATHS" | sed 's/^[[:space:]]*//; s/[[:space:]]*$//' | grep -v '^$')
mapfile -t options < <(printf '%s\n' "$AUDIT_OPTIONS" | sed 's/^[[:space:]]*//; s/[[:space:]]*$//' | grep -v '^$')
mkdir -p "$AUDIT_REPORTS"
worst=0
findings=false
number=0
for path in "${paths[@]}"; do
  number=$((number + 1))
  shown=$(ckpt audit --sarif "$AUDIT_REPORTS/$number.sarif" --junit "$AUDIT_REPORTS/$number.xml" "${options[@]}" -- "$path" 2>&1)
  code=$?
  printf '%s\n' "$shown"
  printf '```\n%s\n```\n\n' "${shown//\`/\'}" >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
  if [ "$code" -eq 1 ]; then findings=true; elif [ "$code" -ne 0 ]; then worst=$code; fi
done
if [ "$number" -eq 0 ]; then
  echo "error: no paths were given" >&2
  worst=2
fi
ok=true
if [ "$findings" = true ] || [ "$worst" -ne 0 ]; then ok=false; fi
printf 'ok=%s\nreports=%s\n' "$ok" "$AUDIT_REPORTS" >> "${GITHUB_OUTPUT:-/dev/null}"
if [ "$worst" -ne 0 ]; then exit "$worst"; fi
if [ "$findings" = true ] && [ "$AUDIT_FAIL" != false ]; then exit 1; fi
