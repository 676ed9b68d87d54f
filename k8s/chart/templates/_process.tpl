{{/* What a process is told: flags and variables. Given root, component and tier. */}}

{{- define "pagewire.args" -}}
{{- $values := .root.Values -}}
- --host={{ $values.listenHost }}
- --port={{ include "pagewire.port" .component }}
- --health-host={{ $values.listenHost }}
- --health-port={{ include "pagewire.healthPort" .component }}
{{- if $values.metrics.enabled }}
- --metrics-host={{ $values.listenHost }}
- --metrics-port={{ include "pagewire.metricsPort" .component }}
{{- end }}
- --log-level={{ $values.logLevel }}
- --log-format={{ $values.logFormat }}
- --lame-duck-s={{ int .tier.lameDuckSeconds }}
- --drain-s={{ include "pagewire.drainSeconds" . }}
{{- if $values.tls.enabled }}
- --tls-cert-file=/etc/pagewire/tls/tls.crt
- --tls-key-file=/etc/pagewire/tls/tls.key
- --tls-ca-file=/etc/pagewire/tls/ca.crt
{{- if not (ternary $values.tls.clientCertificates $values.tls.mutual (eq .component "frontend")) }}
- --no-tls-client-auth
{{- end }}
{{- end }}
{{- if eq .component "frontend" }}
- --core={{ include "pagewire.coreAddresses" .root }}
{{- if .tier.apiKeys.existingSecret }}
- --api-keys-file=/etc/pagewire/api-keys/api-keys
{{- end }}
{{- else if eq .component "core" }}
- --worker={{ include "pagewire.workerAddress" .root }}
- --model={{ $values.model.id }}
{{- with $values.model.revision }}
- --revision={{ . }}
{{- end }}
{{- with $values.model.dtype }}
- --dtype={{ . }}
{{- end }}
{{- with $values.model.quantization }}
- --quantization={{ . }}
{{- end }}
{{- with $values.model.maxModelLen }}
- --max-model-len={{ int . }}
{{- end }}
- --startup-timeout-s={{ int $values.model.loadSeconds }}
{{- else }}
- --device={{ .tier.device }}
{{- end }}
{{- range .tier.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "pagewire.env" -}}
{{- $values := .root.Values -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: HOME, value: /tmp}
{{- with $values.grpcExperiments }}
- {name: GRPC_EXPERIMENTS, value: {{ . | quote }}}
{{- end }}
{{- if $values.otel.endpoint }}
{{ include "pagewire.otelEnv" . }}
{{- end }}
{{- if eq .component "worker" }}
- {name: PAGEWIRE_CACHE, value: /var/cache/pagewire/models}
- {name: PAGEWIRE_KERNEL_CACHE, value: /var/cache/pagewire/kernels/cpu}
- {name: TRITON_CACHE_DIR, value: /var/cache/pagewire/kernels/triton}
- {name: HF_HOME, value: /var/cache/pagewire/models/huggingface}
- {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
{{- if not (hasKey .tier.settings "num_threads") }}
# One thread per CPU asked for, rounded up. Without it there would be one for each of the node's.
- name: PAGEWIRE_WORKER_NUM_THREADS
  valueFrom: {resourceFieldRef: {containerName: worker, resource: requests.cpu}}
{{- end }}
{{- with $values.hf.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $values.hf.key }}}}
{{- end }}
{{- end }}
{{- with .tier.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pagewire.otelEnv" -}}
{{- $otel := .root.Values.otel -}}
{{- $attributes := list "k8s.pod.name=$(POD_NAME)" (printf "k8s.namespace.name=%s" .root.Release.Namespace) (printf "service.namespace=%s" .root.Release.Name) -}}
{{- range $name, $value := $otel.resourceAttributes -}}
{{- $attributes = append $attributes (printf "%s=%s" $name (include "pagewire.number" $value)) -}}
{{- end -}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $otel.endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ $otel.protocol | quote }}}
- {name: OTEL_SERVICE_NAME, value: pagewire-{{ .component }}}
- {name: OTEL_TRACES_SAMPLER, value: {{ $otel.sampler | quote }}}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $otel.samplerArg | toString | quote }}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: {{ join "," $attributes | quote }}}
{{- if $otel.metrics }}
- {name: OTEL_METRICS_EXPORTER, value: otlp}
{{- end }}
{{- with $otel.headersSecret.name }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $otel.headersSecret.key }}}}
{{- end }}
{{- end -}}
