{{/* HOST:PORT of all nodes, for dcpd-member. */}}
{{- define "dcpd.peers" -}}
{{- $peers := list -}}
{{- range $number := until (int .Values.replicas) -}}
{{- $peers = append $peers (printf "%s-%d.%s:11210" $.Release.Name $number $.Release.Name) -}}
{{- end -}}
{{- join " " $peers -}}
{{- end -}}
