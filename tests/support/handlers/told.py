"""Tells what a handler is told: headers, ids, properties; answers with status, headers and phrase."""


class Told:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        replies = []
        for i in range(len(data)):
            context.set_response_content_type(i, "application/json")
            context.set_response_header(i, "X-Answer", "forty-two")
            wish = context.get_request_header(i, "x-status")
            if wish:
                context.set_response_status(int(wish), "As You Like", i)
            replies.append(
                {
                    "id": context.get_request_id(i),
                    "headers": context.get_all_request_header(i),
                    "properties": context.system_properties,
                    "manifest": context.manifest,
                    "config": dict(context.model_yaml_config),
                }
            )
        return replies
