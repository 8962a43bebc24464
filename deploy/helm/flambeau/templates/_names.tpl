{{- define "flambeau.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "flambeau.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "flambeau.labels" -}}
{{ include "flambeau.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "flambeau.keys" -}}
{{- if .Values.keys.existingSecret }}{{ .Values.keys.existingSecret }}{{ else }}{{ include "flambeau.name" . }}-keys{{ end }}
{{- end }}

{{- define "flambeau.probe" -}}
httpGet:
  path: {{ .path }}
  port: inference
  scheme: {{ if .tls }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}
