// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// Labels are a prompt and what a teacher goes on with. The teacher's choices always count; of the prompt, what is not ignored does.

sec.graph "continued" {
  sec.symbol "B" kind "rows" key "prompt" dim 0
  sec.block "teacher" class "LM" params 10 trainable 0
  sec.block "student" class "LM" params 10 trainable 10
  sec.case "all" when [] {
    // CHECK: [[KEPT:%[0-9]+]] = sec.glue "aten.ne.Scalar" (%prompt) args "$0, -100"
    // CHECK-NEXT: [[CHOSEN:%[0-9]+]] = sec.glue "aten.ones.default" args "[B, 1], dtype=torch.bool"
    // CHECK-NEXT: [[ALL:%[0-9]+]] = sec.glue "aten.cat.default" ([[KEPT]], [[CHOSEN]]) args "[$0, $1], 1"
    // CHECK-NEXT: [[FLAT:%[0-9]+]] = sec.glue "aten.view.default" ([[ALL]]) args "$0, [5*B]"
    // CHECK-NEXT: [[COUNT:%[0-9]+]] = sec.glue "aten.sum.default" ([[FLAT]])
    // CHECK-NEXT: sec.leaf "loss.count" ([[COUNT]])
    %prompt = sec.input "prompt" : !sec.tensor<[B, 4], i64>
    %scores = sec.call "teacher" (%prompt) args "$0" outs [""] : !sec.tensor<[B, 40], f32>
    %next = sec.glue "aten.argmax.default" (%scores) args "$0, -1, True" : !sec.tensor<[B, 1], i64>
    %ids = sec.glue "aten.cat.default" (%prompt, %next) args "[$0, $1], 1" : !sec.tensor<[B, 5], i64>
    %labels = sec.glue "aten.view.default" (%ids) args "$0, [5*B]" : !sec.tensor<["5*B"], i64>
    %logits = sec.call "student" (%ids) args "$0" outs [""] : !sec.tensor<["5*B", 40], f32, grad>
    %loss, %weight = sec.glue "aten.nll_loss_forward.default" (%logits, %labels) args "$0, $1, None, 1, -100" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    sec.return (%loss)
  }
}
